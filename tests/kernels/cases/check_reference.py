"""Each kernel equals its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_tagma.kernels import expansion, slot_mapping
from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.lab.kernel_check import kernel_checks, kernel_reference
from vllm_tagma.ranges import PAD_SLOT_ID, encode


@pytest.mark.parametrize(
    "case", range(len(kernel_checks.CASES)), ids=[n for n, _ in kernel_checks.CASES]
)
def check_case(device: str, case: int) -> None:
    kernel_checks.check_case(case, device=device)


def _slots(device: str, ids: list[int], at: list[int], **changes: Any) -> list[int]:
    """Slots of one request on row 1 of 3, block size 16, in a buffer of 12."""
    tables = DeviceRangeTables.empty(groups=1, rows=3, device=device)
    rows = {1: ids, 2: [500, 501, 502]}
    tables.send([kernel_reference.row_write(ids, group=0, row=row) for row, ids in rows.items()])
    values = {
        "idx_mapping": torch.tensor([1], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, len(at)], dtype=torch.int32),
        "positions": torch.tensor(at, dtype=torch.int64),
        "block_sizes": torch.tensor([16], dtype=torch.int32),
        "enabled": torch.tensor([True]),
        "out": torch.full((1, 12), kernel_checks.STALE, dtype=torch.int64),
        **changes,
    }
    values = {name: tensor.to(device) for name, tensor in values.items()}
    out = slot_mapping.compute_slot_mappings(tables, **values)
    return [int(slot) for slot in out[0]]


def check_positions_outside_every_range_are_padded(device: str) -> None:
    positions = [0, 17, 47, 48, -1, 1 << 20, 1 << 33, -(1 << 33), 31]
    found = _slots(device, [7, 8, 30], positions)
    assert found == [112, 129, 495] + [PAD_SLOT_ID] * 5 + [8 * 16 + 15] + [PAD_SLOT_ID] * 3


def check_positions_need_not_ascend(device: str) -> None:
    found = _slots(device, [7, 8, 30, 3], [40, 3, 63, 16])
    assert found[:4] == [30 * 16 + 8, 7 * 16 + 3, 3 * 16 + 15, 8 * 16]


def check_null_blocks_have_no_slots(device: str) -> None:
    assert _slots(device, [0, 0, 5], [0, 31, 32])[:3] == [PAD_SLOT_ID, PAD_SLOT_ID, 80]


def check_rows_without_blocks_are_padded(device: str) -> None:
    assert _slots(device, [], [0, 5]) == [PAD_SLOT_ID] * 12


@pytest.mark.parametrize("index", [-1, 3, 1 << 20])
def check_indexes_outside_the_table_are_padded(device: str, index: int) -> None:
    mapping = torch.tensor([index], dtype=torch.int32)
    assert _slots(device, [7], [0, 1], idx_mapping=mapping) == [PAD_SLOT_ID] * 12


def check_groups_not_enabled_are_padded(device: str) -> None:
    assert _slots(device, [7], [0, 1], enabled=torch.tensor([False])) == [PAD_SLOT_ID] * 12


def check_int64_indexes_are_taken(device: str) -> None:
    assert _slots(device, [7], [1], idx_mapping=torch.tensor([1]))[0] == 113


def check_a_slot_beyond_32_bits(device: str) -> None:
    block = (1 << 31) - 2
    sizes = torch.tensor([256], dtype=torch.int32)
    assert _slots(device, [5, block], [300], block_sizes=sizes)[0] == block * 256 + 44


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("positions", torch.zeros(4, dtype=torch.int32), "positions must be int64, not int32"),
        ("query_start_loc", torch.zeros(1, dtype=torch.int32), r"shape \[> requests\], not \[1\]"),
        ("idx_mapping", torch.zeros(1, 1, dtype=torch.int32), r"idx_mapping must have shape"),
        (
            "block_sizes",
            torch.ones(2, dtype=torch.int32),
            r"block_sizes must have shape \[groups\]",
        ),
        ("enabled", torch.ones(1, dtype=torch.int32), "enabled must be bool"),
        ("out", torch.zeros(1, 12, dtype=torch.int32), "out must be int64"),
        ("out", torch.zeros(1, 24, dtype=torch.int64)[:, ::2], "out must have stride 1"),
    ],
)
def check_wrong_arguments_are_refused(
    device: str, name: str, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _slots(device, [7], [0], **{name: tensor})


@pytest.mark.parametrize("reach", [1, 16, 40, 10_000])
def check_windows_are_masked(device: str, reach: int) -> None:
    """Entries wholly below the window become null, from the tokens computed of each row."""
    batch = kernel_checks.draw_batch(seed=reach, device=device, requests=5, num_ranges=(1, 5))
    computed = torch.arange(8, dtype=torch.int32) * 8 + min(reach, 40) - 1  # around block edges
    tables = []
    for expand, where in (
        (expansion.expand_block_tables, batch),
        (kernel_reference.expand_block_tables, kernel_checks.on_host(batch)),
    ):
        out = torch.full((6, 40), kernel_checks.STALE, dtype=torch.int32)
        out = out.to(where.positions.device)
        expand(
            where.tables,
            where.idx_mapping,
            group=0,
            num_rows=6,
            out=out,
            block_size=16,
            num_computed_tokens=computed.to(out.device),
            sliding_window_reach=reach,
        )
        tables.append(out.cpu())
    assert torch.equal(*tables)
    assert (reach == 10_000) != bool((tables[0][:5] == 0).any())


def check_a_row_longer_than_the_table_is_cut(device: str) -> None:
    tables = DeviceRangeTables.empty(groups=1, rows=1, device=device)
    tables.send([kernel_reference.row_write([9, 10, 3, 4], group=0, row=0)])
    out = torch.full((2, 3), kernel_checks.STALE, dtype=torch.int32, device=device)
    expansion.expand_block_tables(
        tables,
        torch.zeros(1, dtype=torch.int32, device=device),
        group=0,
        num_rows=1,
        out=out,
        block_size=16,
    )
    assert out.tolist() == [[9, 10, 3], [kernel_checks.STALE] * 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1}, "group 1 is outside 0..0"),
        ({"num_rows": 1}, r"idx_mapping must have shape \[<= num_rows\]"),
        ({"num_rows": 9}, r"out must have shape \[>= num_rows, width\]"),
        ({"sliding_window_reach": 4}, "needs num_computed_tokens"),
    ],
)
def check_wrong_expansions_are_refused(device: str, changes: dict[str, Any], message: str) -> None:
    tables = DeviceRangeTables.empty(groups=1, rows=2, device=device)
    arguments: dict[str, Any] = {
        "group": 0,
        "num_rows": 3,
        "out": torch.zeros(4, 5, dtype=torch.int32, device=device),
        "block_size": 16,
    }
    mapping = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        expansion.expand_block_tables(tables, mapping, **{**arguments, **changes})


def check_a_row_write_is_the_inverse_of_decode() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        ids = rng.integers(0, 6, size=int(rng.integers(0, 12))).tolist()
        tables = DeviceRangeTables.empty(groups=2, rows=2, device="cpu")
        tables.send([kernel_reference.row_write(ids, group=1, row=1)])
        assert kernel_reference.decode(tables, group=1, row=1).tolist() == ids
        assert int(tables.num_ranges[1, 1]) == len(encode(ids))
