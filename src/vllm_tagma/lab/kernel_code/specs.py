"""The kernels that are compiled, each with the arguments of a common launch.

A model of 32 heads, 8 KV heads of 128, bf16, blocks of 16 tokens with tokens outside heads: what
vLLM's Triton attention and ours are given in the same step. vLLM's kernels are read from the
installed release, if there is one.
"""

from __future__ import annotations

from typing import Any

from vllm_tagma.kernels import attention_kernels, device_range_tables, expansion, slot_mapping
from vllm_tagma.kernels.range_attention import TILE
from vllm_tagma.lab.kernel_check import paged_attention
from vllm_tagma.lab.kernel_code.assembly import Spec

_HEADS, _PER_KV, _HEAD, _BLOCK, _PIECES = 32, 4, 128, 16, 16


def _pointers(kernel: Any, *, other: str = "*i32", **named: str) -> dict[str, str]:
    types = {name: other for name in kernel.arg_names if name.endswith(("_ptr", "_ptrs"))}
    return {**types, **named}


def _range_attention(name: str, **changed: Any) -> Spec:
    kernel = attention_kernels.range_attention_kernel
    constants = {
        "PER_KV": _PER_KV, "QUERIES": 16 // _PER_KV, "ROWS": 16, "HEAD": _HEAD,
        "HEAD_PADDED": _HEAD, "BLOCK_SIZE": _BLOCK, "WINDOW": 0, "SOFT_CAP": False, "SINKS": False,
        "SPANS": True, "SEARCH": False, "PIECES": 1, "MAX_RANGES": 256, "NULL_BLOCK": 0,
        "TILE": TILE, "sink_ptr": None, **changed,
    }  # fmt: skip
    if constants["PIECES"] == 1:
        constants.update(acc_ptr=None, highest_ptr=None, total_ptr=None)
    data = dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr"), "*bf16")
    pieces = dict.fromkeys(("acc_ptr", "highest_ptr", "total_ptr"), "*fp32")
    return Spec(
        name=name,
        kernel=kernel,
        constants=constants,
        types=_pointers(
            kernel, **data, **pieces, idx_mapping_ptr="*i64", scale="fp32", soft_cap="fp32"
        ),
        aligned=tuple(a for a in kernel.arg_names if "stride" in a or a == "piece_width"),
    )


def range_specs() -> tuple[Spec, ...]:
    """Attention over ranges: a decode in pieces, a prefill, and the layouts that do not span."""
    return (
        _range_attention("attention, decode", PIECES=_PIECES),
        _range_attention("attention, prefill", SEARCH=True),
        _range_attention("attention, decode, heads outside tokens", PIECES=_PIECES, SPANS=False),
    )


def baseline_specs() -> tuple[Spec, ...]:
    """The baseline of the GPU check, with and without its table loads."""
    kernel = paged_attention.paged_attention_kernel
    data = dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr"), "*bf16")
    pieces = dict.fromkeys(("acc_ptr", "highest_ptr", "total_ptr"), "*fp32")
    constants = {
        "PER_KV": _PER_KV, "QUERIES": 16 // _PER_KV, "ROWS": 16, "HEAD": _HEAD,
        "HEAD_PADDED": _HEAD, "BLOCK_SIZE": _BLOCK, "PIECES": _PIECES,
        "TILE": paged_attention.DECODE_TILE,
    }  # fmt: skip
    return tuple(
        Spec(
            name=f"baseline, decode, {'' if table else 'no '}table",
            kernel=kernel,
            constants={**constants, "TABLE": table},
            types=_pointers(kernel, **data, **pieces, scale="fp32"),
            aligned=tuple(a for a in kernel.arg_names if "stride" in a or a == "piece_width"),
        )
        for table in (True, False)
    )


def write_specs() -> tuple[Spec, ...]:
    """The kernels of the write path, and the one that joins pieces of attention."""
    batch = {"idx_mapping_ptr": "*i64", "query_start_loc_ptr": "*i32", "positions_ptr": "*i64"}
    shared = {"MAX_RANGES": 256, "NULL_BLOCK": 0, "PAD": -1, "TILE": 1024, "HEADER": 6}
    slots, expand = slot_mapping._slot_mapping_kernel, expansion._expansion_kernel
    write, join = device_range_tables._write_rows_kernel, attention_kernels.join_kernel
    return (
        Spec(
            name="slot mapping",
            kernel=slots,
            constants=shared,
            types=_pointers(slots, **batch, out_ptr="*i64", enabled_ptr="*i1"),
        ),
        Spec(
            name="expansion",
            kernel=expand,
            constants={**shared, "MASKS_WINDOW": False},
            types=_pointers(expand, idx_mapping_ptr="*i64"),
        ),
        Spec(name="row writes", kernel=write, constants=shared, types=_pointers(write)),
        Spec(
            name="attention, joining pieces",
            kernel=join,
            constants={"HEAD": _HEAD, "HEAD_PADDED": _HEAD, "PIECES": _PIECES},
            types=_pointers(join, other="*fp32", out_ptr="*bf16", query_start_loc_ptr="*i32"),
            aligned=("out_stride_0", "out_stride_1", "piece_width"),
        ),
    )


def vllm_specs() -> tuple[Spec, ...]:
    """vLLM's kernels for the same work. Empty without vLLM. Imports it, which takes seconds."""
    try:
        attention, slots, gather = _vllms_kernels()
    except ImportError:
        return ()
    layout = {"BLOCK_SIZE": 1024, "TRITON_BLOCK_SIZE": 1024, "PAD_ID": -1}
    return (
        _paged_attention("attention, decode", attention, IS_3D=True, TILE_SIZE=16),
        _paged_attention("attention, prefill", attention, IS_3D=False, TILE_SIZE=32),
        Spec(
            name="slot mapping",
            kernel=slots,
            vllms=True,
            constants={**layout, "CP_SIZE": 1, "CP_INTERLEAVE": 1},
            types={
                "idx_mapping": "*i64", "query_start_loc": "*i32", "pos": "*i64",
                "block_table_ptrs": "*u64", "block_table_strides": "*i64", "block_sizes": "*i32",
                "slot_mapping_enabled": "*i1", "dcp_sharded": "*i1", "slot_mappings_ptr": "*i64",
            },
        ),
        Spec(
            name="expansion",
            kernel=gather,
            vllms=True,
            constants=layout,
            types={
                "batch_idx_to_req_idx": "*i64", "src_block_table_ptrs": "*u64",
                "dst_block_table_ptrs": "*u64", "block_table_strides": "*i64",
                "num_blocks_ptr": "*i32", "sliding_window_reach_ptr": "*i32",
                "num_computed_tokens_ptr": "*i32",
            },
        ),
    )  # fmt: skip


def _vllms_kernels() -> tuple[Any, Any, Any]:
    from triton import backends

    stand_in: Any = backends.Backend(compiler=None, driver=_AlwaysActive)
    # vLLM's CPU build defines no kernel unless Triton has this backend; compiling needs none.
    known = backends.backends.setdefault("cpu", stand_in)
    try:
        from vllm.v1.attention.ops.triton_unified_attention import kernel_unified_attention
        from vllm.v1.worker.gpu import block_table
    finally:
        if known is stand_in:
            del backends.backends["cpu"]

    return (
        kernel_unified_attention,
        block_table._compute_slot_mappings_kernel,
        block_table._gather_block_tables_kernel,
    )


class _AlwaysActive:
    @staticmethod
    def is_active() -> bool:
        return True


def _paged_attention(name: str, kernel: Any, **changed: Any) -> Spec:
    """As vLLM's launcher calls it; ``changed``: in what decode and prefill differ."""
    flags = [a for a in kernel.arg_names if a.startswith("USE_")]
    constants = {
        **dict.fromkeys(flags, False), "USE_CAUSAL": True,
        "num_query_heads": _HEADS, "num_queries_per_kv": _PER_KV, "BLOCK_SIZE": _BLOCK,
        "HEAD_SIZE": _HEAD, "HEAD_SIZE_PADDED": _HEAD, "SLIDING_WINDOW": 0, "MAX_MM_RANGES": 0,
        "R_SWA_WINDOW": 0, "stride_k_cache_3": 1, "stride_v_cache_3": 1, "BLOCK_Q": 16 // _PER_KV,
        "BLOCK_M": 16, "KV_QUANT_MODE": 0, "FP8_MIN": -448.0, "FP8_MAX": 448.0,
        "CHUNK_LOOKBACK": -1, "CHUNK_SIZE": -1, "Q_IS_FP8": False, "MM_PREFIX_CLAMP_SW": False,
        "NUM_SEGMENTS_PER_SEQ": _PIECES if changed["IS_3D"] else 1,
        **dict.fromkeys(
            ("sink_ptr", "alibi_slopes_ptr", "qq_bias_ptr", "q_scale", "per_seq_causal_ptr",
             "mm_prefix_range_ptr", "k_scale_cache_ptr", "v_scale_cache_ptr", "stride_ks_blk",
             "stride_ks_slot", "stride_ks_head", "stride_vs_blk", "stride_vs_slot",
             "stride_vs_head")
        ),
        **changed,
    }  # fmt: skip
    segments = dict.fromkeys(("segm_output_ptr", "segm_max_ptr", "segm_expsum_ptr"), "*fp32")
    if not changed["IS_3D"]:
        constants.update(dict.fromkeys(segments))
    strides = {a: "i64" for a in kernel.arg_names if "stride" in a}
    data = ("output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr")
    return Spec(
        name=name,
        kernel=kernel,
        vllms=True,
        constants=constants,
        types=_pointers(
            kernel, **dict.fromkeys(data, "*bf16"), **segments, **strides,
            k_scale="*fp32", v_scale="*fp32", scale="fp32", out_scale="fp32", softcap="fp32",
        ),
        aligned=tuple(a for a in strides if a != "qq_bias_stride_0"),
    )  # fmt: skip
