"""Shares of a step from made-up traces of both kinds, and the rule about range reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from vllm_tagma.lab.bench_serve import serve_kernels
from vllm_tagma.lab.bench_serve.serve_kernels import ATTENTION, OTHER, SLOTS, TABLE, WRITES


def event(name: str, dur: float, cat: str) -> dict:
    return {"ph": "X", "name": name, "dur": dur, "cat": cat, "ts": 0}


STEP = event("execute_context_1(13)_generation_2(2)", 1000.0, "user_annotation")
EMPTY = event("execute_context_0(0)_generation_0(0)", 900.0, "user_annotation")


def test_cpu_shares_are_of_the_steps() -> None:
    found = serve_kernels.shares(
        [
            STEP,
            STEP,
            EMPTY,
            event(serve_kernels.SLOT_SCOPE, 20.0, "user_annotation"),
            event("_C::compute_slot_mapping_kernel_impl", 15.0, "cpu_op"),  # inside the scope
            event(serve_kernels.TABLE_SCOPE, 10.0, "user_annotation"),
            event("_C::cpu_attention_with_kv_cache", 300.0, "cpu_op"),
            event("vllm::unified_attention_with_output", 400.0, "cpu_op"),  # around it
            event("_C::cpu_attn_reshape_and_cache", 100.0, "cpu_op"),
            event("_C::onednn_mm", 900.0, "cpu_op"),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert (found["on"], found["steps"], found["step_us"]) == ("cpu", 2, 2000.0)
    expected = {SLOTS: 20, TABLE: 10, ATTENTION: 300, WRITES: 100, OTHER: 1570}
    assert found["us"] == expected
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["top"][0] == ["_C::onednn_mm", 900.0]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("_compute_slot_mappings_kernel", SLOTS),
        ("_slot_mapping_kernel", SLOTS),
        ("_gather_block_tables_kernel", TABLE),
        ("_expansion_kernel", TABLE),
        ("_write_rows_kernel", TABLE),
        ("void vllm::reshape_and_cache_flash_kernel<bf16>", WRITES),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", ATTENTION),
        ("kernel_unified_attention_2d", ATTENTION),
        ("BatchDecodeWithPagedKVCacheKernel", ATTENTION),
        ("sm90_xmma_gemm_bf16bf16", OTHER),
        ("Memcpy HtoD", OTHER),
    ],
)
def test_gpu_kernels_are_sorted_by_name(name: str, category: str) -> None:
    kernel = event(name, 30.0, "gpu_memcpy" if name.startswith("Memcpy") else "kernel")
    rest = event("some_gemm", 70.0, "kernel")
    host = event("aten::mm", 5000.0, "cpu_op")
    found = serve_kernels.shares([STEP, kernel, rest, host])
    assert (found["on"], found["step_us"]) == ("gpu", 100.0)
    assert found["shares"][category] == pytest.approx(1.0 if category == OTHER else 0.3)


def test_the_names_of_our_own_kernels_are_known(pytestconfig: pytest.Config) -> None:
    """Those of kernels/ that serve: each falls into slot mapping or the table."""
    folder = pytestconfig.rootpath / "src" / "vllm_tagma" / "kernels"
    names = [
        line.split("(")[0].removeprefix("def ")
        for file in ("slot_mapping", "expansion", "device_range_tables")
        for line in (folder / f"{file}.py").read_text().splitlines()
        if line.startswith("def _") and line.split("(")[0].endswith("_kernel")
    ]
    assert len(names) >= 3
    for name in names:
        found = serve_kernels.shares([STEP, event(name, 1.0, "kernel")])
        assert found["shares"][OTHER] == 0.0, name


def test_the_best_case_of_range_reads() -> None:
    shares = {SLOTS: 0.5, TABLE: 0.012, ATTENTION: 0.1, WRITES: 0.0, OTHER: 0.388}
    assert serve_kernels.best_case(shares) == pytest.approx(0.022)


def test_traces_are_read_from_files(tmp_path: Path) -> None:
    document = json.dumps({"traceEvents": [STEP]}).encode()
    (tmp_path / "rank0.1.pt.trace.json.gz").write_bytes(gzip.compress(document))
    assert serve_kernels.analyse(tmp_path)["steps"] == 1
    (tmp_path / "rank1.1.pt.trace.json").write_bytes(document)
    assert serve_kernels.analyse(tmp_path)["steps"] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "wrote no trace"),
        (b"{", "no trace that can be read"),
        (json.dumps({"traceEvents": [EMPTY]}).encode(), "no step of the worker"),
    ],
)
def test_no_trace(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "rank0.1.pt.trace.json").write_bytes(content)
    with pytest.raises(serve_kernels.TraceError, match=words):
        serve_kernels.analyse(tmp_path)
