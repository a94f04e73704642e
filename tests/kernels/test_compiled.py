"""The kernels as compiled for GPUs, which needs no GPU: they compile, and load as claimed.

Triton lowers a kernel to machine code for a named architecture anywhere. Its first intermediate
form keeps loads as written, so a table load per position would show as a load of a tile of int32.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_tagma.kernels import block_moves, device_range_tables, expansion, slot_mapping
from vllm_tagma.lab.kernel_check import paged

_RANGES = {
    "range_start_ptr": "*i32",
    "range_cum_ptr": "*i32",
    "num_ranges_ptr": "*i32",
    "num_blocks_ptr": "*i32",
}
_BATCH = {"idx_mapping_ptr": "*i32", "query_start_loc_ptr": "*i32", "positions_ptr": "*i64"}
_CONSTANTS = {"MAX_RANGES": 256, "NULL_BLOCK": 0, "PAD": -1, "TILE": 1024, "HEADER": 6}
_TYPES = {
    **_RANGES,
    **_BATCH,
    "packed_ptr": "*i32",
    "block_sizes_ptr": "*i32",
    "enabled_ptr": "*i1",
    "num_computed_tokens_ptr": "*i32",
    "block_table_ptr": "*i32",
}
KERNELS = {
    "slot_mapping": (slot_mapping._slot_mapping_kernel, {"out_ptr": "*i64"}),
    "expansion": (expansion._expansion_kernel, {"MASKS_WINDOW": False}),
    "expansion, window": (expansion._expansion_kernel, {"MASKS_WINDOW": True}),
    "write_rows": (device_range_tables._write_rows_kernel, {}),
    "block_moves": (
        block_moves._block_moves_kernel,
        {
            "tiles_ptr": "*i64",
            "ITEM": tl.int64,
            "ALIGN": 16,
            "ITEMS_PER_ALIGN": 2,
            "FREE": block_moves.FREE,
            "BATCH": block_moves.BATCH,
            "TILE": block_moves.TILE_BYTES // 8,
        },
    ),
    "paged slot_mapping": (paged._slot_mapping_kernel, {"out_ptr": "*i64"}),
    "paged gather": (paged._gather_kernel, {}),
}


def compiled(name: str, capability: int = 90) -> Any:
    """The kernel compiled for one compute capability; scalars are 32-bit integers."""
    kernel, own = KERNELS[name]
    constants = {k: v for k, v in {**_CONSTANTS, **own}.items() if not isinstance(v, str)}
    types = {"out_ptr": "*i32", **_TYPES, **{k: v for k, v in own.items() if isinstance(v, str)}}
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_a_gpu(name: str, capability: int) -> None:
    assert len(compiled(name, capability).asm["cubin"]) > 1000


def loads_of(name: str) -> list[str]:
    """The types of all loads in the code of a kernel, e.g. ``tensor<1024xi64>``."""
    code = compiled(name).asm["ttir"]
    loads = re.findall(r"tt\.load .* : (?:tensor<(\d+)x)?!tt\.ptr<(i\d+)>", code)
    assert len(loads) == code.count("tt.load ")
    return sorted(f"{lanes}x{dtype}" if lanes else dtype for lanes, dtype in loads)


def test_the_range_kernels_load_no_table_entry_per_position() -> None:
    tiles = [load for load in loads_of("slot_mapping") if load.startswith("1024x")]
    assert tiles == ["1024xi64"], "a tile loads its positions and nothing else"
    assert [load for load in loads_of("expansion") if load.startswith("1024x")] == []


def test_the_paged_kernels_load_one_table_entry_per_position() -> None:
    tiles = [load for load in loads_of("paged slot_mapping") if load.startswith("1024x")]
    assert tiles == ["1024xi32", "1024xi64"]
    assert [load for load in loads_of("paged gather") if load.startswith("1024x")] == ["1024xi32"]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_mover_copies_sixteen_bytes_an_instruction(capability: int) -> None:
    """Of each batch, all loads come before its stores, with a barrier between if order matters."""
    code = compiled("block_moves", capability).asm["ptx"]
    loads = re.findall(r"ld\.global(?:\.\w+)*\.v(\d)\.b64", code)
    stores = re.findall(r"st\.global(?:\.\w+)*\.v(\d)\.b64", code)
    assert set(loads) == set(stores) == {"2"}
    in_flight = block_moves.BATCH * block_moves.TILE_BYTES // (4 * 32) // 16
    assert len(stores) == in_flight == 8
    assert len(loads) == in_flight + in_flight // block_moves.BATCH  # and a cycle's first block
    assert "bar.sync" in code[code.rindex(".v2.b64", 0, code.index("st.global")) :]
    assert not re.search(r"\b(ld|st)\.local", code)
