"""``make gpu-check``: what it needs, what it says without a GPU, that it compares like with like.

The times themselves need a GPU.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from vllm_tagma.lab.kernel_check import attention_bench

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "vllm_tagma"
KERNELS, KERNEL_CHECK = PACKAGE / "kernels", PACKAGE / "lab" / "kernel_check"


def run(arguments: list[str], **extra: str) -> subprocess.CompletedProcess[str]:
    """Python with the source tree on its path and no GPU in sight."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "CUDA_VISIBLE_DEVICES": ""}
    environment.update(extra)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    out = tmp_path / "gpu-check.json"
    result = run(["-m", "vllm_tagma.lab.kernel_check.gpu_check", "--out", str(out)])
    assert result.returncode == 2
    assert "sees no CUDA device on this machine. Nothing was checked or timed" in result.stderr
    assert not out.exists()


def test_it_needs_neither_vllm_nor_the_extension() -> None:
    code = (
        "import sys, vllm_tagma.lab.kernel_check.gpu_check;"
        "print(sorted(m for m in sys.modules if m == 'vllm' or m.startswith('vllm_tagma._')))"
    )
    result = run(["-c", code])
    assert result.stdout.strip() == "[]", result.stderr


def test_the_folders_import_torch_numpy_and_triton_alone() -> None:
    known = set(sys.stdlib_module_names) | {"torch", "numpy", "triton"}
    ours_of = {
        KERNELS: ("vllm_tagma.kernels", "vllm_tagma.ranges"),
        KERNEL_CHECK: ("vllm_tagma.kernels", "vllm_tagma.ranges", "vllm_tagma.lab.kernel_check"),
    }
    for path in sorted(path for folder in ours_of for path in folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            else:
                continue
            for name in names:
                ours = name.startswith(ours_of[path.parent])
                assert ours or name.split(".")[0] in known, f"{path.name} imports {name}"


def test_both_ways_of_a_workload_write_the_same() -> None:
    code = """
from vllm_tagma.lab.kernel_check import gpu_check
from vllm_tagma.lab.kernel_check.layouts import draw_batch
batch = draw_batch(seed=3, device="cpu", requests=4, num_ranges=3, blocks_per_row=40, query=30)
for make in (gpu_check.slots_of, gpu_check.tables_of):
    workload = make("small", batch)
    paged = workload.paged().flatten().clone()
    assert int(paged.max()) > 0
    workload.tagma().zero_()
    print(bool((workload.tagma().flatten() == paged).all()))
"""
    result = run(["-c", code], TRITON_INTERPRET="1")
    assert result.stdout.split() == ["True", "True"], result.stderr[-3000:]


def test_a_dry_run_takes_the_steps_of_attention(tmp_path: Path) -> None:
    """Each way on each pool is compared and timed, and the rule is stated; figures mean nothing."""
    out = tmp_path / "gpu-check.json"
    arguments = ["-m", "vllm_tagma.lab.kernel_check.gpu_check", "--dry-run", "--out", str(out)]
    result = run(arguments, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    report = json.loads(out.read_text())["attention"]
    ways = {row["name"]: sorted(row.keys() - {"name"}) for row in report["timings"]}
    both = ["expansion", "paged", "ranges"]
    assert ways == {
        f"{what}, {pool}": sorted(found)
        for what in ("decode", "prefill")
        for pool, found in (
            ("contiguous", [*both, "no table"]), ("cut", both), ("scattered", ["paged"])
        )
    }  # fmt: skip
    assert len(report["checks"]) == 12
    assert "Rule: read ranges if" in result.stdout
    assert re.search(r"Range reads on this card: (yes|no)\.", result.stdout)


def test_the_rule_for_range_reads() -> None:
    way = {"paged": 100.0, "no table": 95.0, "ranges": 95.0, "expansion": 0.0}
    cut = {"paged": 100.0, "ranges": 100.5, "expansion": 0.0}
    times = {("a", "contiguous"): way, ("a", "cut"): cut}
    lines = attention_bench.decision(times)
    assert lines[0] == "a, contiguous: range reads spare 5.0%; table loads are 5.0% of paged"
    assert lines[-1] == "Range reads on this card: yes."
    times["b", "contiguous"] = {**way, "ranges": 99.0}
    assert attention_bench.decision(times)[-1] == "Range reads on this card: no."
    del times["b", "contiguous"]
    times["a", "cut"] = {**cut, "ranges": 102.0}
    assert attention_bench.decision(times)[-1] == "Range reads on this card: no."


def test_both_ways_of_moving_blocks_leave_the_same() -> None:
    """Small ones; the check that runs on a GPU has cases of its own."""
    code = """
import torch
from vllm_tagma.lab.kernel_check import move_workloads
for workload in move_workloads.move_workloads("cpu", counts=(16,), shape=(2, 8)):
    start = torch.arange(32 * 16).view(32, 2, 8).bfloat16()
    left = []
    for way in (workload.paged, workload.tagma):
        way().copy_(start)
        left.append(way().clone())
    print(bool((left[0] == left[1]).all()), bool((left[0] != start).any()))
move_workloads._WIDTHS = (777, 4096)
move_workloads.check_moves(device="cpu")
original = move_workloads.copy_one_by_one
move_workloads.copy_one_by_one = lambda cache, copies: original(cache, copies[1:])
try:
    move_workloads.check_moves(device="cpu")
except AssertionError as error:
    print(str(error)[:60])
"""
    result = run(["-c", code], TRITON_INTERPRET="1")
    assert result.stdout.splitlines() == [
        "True True",
        "True True",
        "777 bytes, copies [(3, 7)]: layer 0, blocks [7]",
    ], result.stderr[-3000:]
