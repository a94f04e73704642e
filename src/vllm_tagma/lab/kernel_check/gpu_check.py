"""``make gpu-check``: the kernels on this machine's GPU, checked against their reference and timed.

Needs Python, torch and Triton, and a CUDA device; neither vLLM nor the compiled part of this
package. Times the range kernels beside the paged baseline (``paged.py``, ``paged_attention.py``) on
the same physical layout, and the mover beside vLLM's way of copying blocks; writes JSON, prints
tables and what follows for the read path. Whatever the figures say, they are printed; it fails only
if a check fails or there is no GPU.

``--dry-run`` takes the steps of attention at tiny sizes without a GPU, under Triton's interpreter
(``TRITON_INTERPRET=1``); its times mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import triton

from vllm_tagma.kernels import expansion, slot_mapping
from vllm_tagma.lab.kernel_check import attention_bench, kernel_checks, kernel_timing, paged
from vllm_tagma.lab.kernel_check.kernel_workload import Workload
from vllm_tagma.lab.kernel_check.layouts import Batch, draw_batch
from vllm_tagma.lab.kernel_check.move_workloads import check_moves, move_workloads

BLOCK_SIZE: Final = 16
SECONDS: Final = 160
"""After this long no further slot mapping or expansion is timed."""

ALL_SECONDS: Final = 440
"""After this long no attention either, so that the whole takes less than eight minutes."""

NO_CUDA: Final = 2
FAILED: Final = 1


def slot_workloads() -> Iterator[Workload]:
    """Slot mapping: one prompt, or one token of each of many requests with 4K tokens behind it."""
    shapes = [(f"prefill {n >> 10}K tokens", 1, n, n) for n in (4096, 16384, 131072)]
    shapes += [(f"decode {n} requests", n, 1, 4096) for n in (64, 256, 512)]
    for name, requests, query, context in shapes:
        for ranges in (1, 8):
            batch = _batch(requests=requests, query=query, context=context, ranges=ranges)
            yield slots_of(f"slots, {name}, {ranges} range{'s' * (ranges > 1)}", batch)


def table_workloads() -> Iterator[Workload]:
    """Attention's tables for a step: copied rows against expanded ranges."""
    for requests, context in ((64, 16384), (16, 131072)):
        for ranges in (1, 8):
            batch = _batch(requests=requests, query=1, context=context, ranges=ranges)
            shape = f"{requests} requests of {context >> 10}K tokens"
            yield tables_of(f"tables, {shape}, {ranges} range{'s' * (ranges > 1)}", batch)


def _moves() -> Iterator[Workload]:
    """Block copies; in caches of 4 GiB if they fit twice, else of 512 MiB."""
    free, _ = torch.cuda.mem_get_info()
    return move_workloads("cuda", counts=(512, 4096) if free > 8 << 30 else (512,))


def _batch(*, requests: int, query: int, context: int, ranges: int) -> Batch:
    return draw_batch(
        seed=requests + ranges,
        device="cuda",
        requests=requests,
        num_ranges=ranges,
        block_sizes=(BLOCK_SIZE,),
        blocks_per_row=context // BLOCK_SIZE,
        query=query,
    )


def slots_of(name: str, batch: Batch) -> Workload:
    """Slot mapping of a batch of one group, in a buffer of at least 8,192 tokens."""
    table = batch.block_table(0, width=max(len(ids) for ids in batch.rows[0]))
    width = max(8192, batch.num_tokens)
    device = batch.positions.device
    out = torch.zeros((1, width), dtype=torch.int64, device=device)
    enabled = torch.ones(1, dtype=torch.bool, device=device)
    batch_arguments = (batch.idx_mapping, batch.query_start_loc, batch.positions)

    def by_table() -> torch.Tensor:
        return paged.compute_slot_mappings(
            table, *batch_arguments, block_size=BLOCK_SIZE, out=out[0]
        )

    def by_ranges() -> torch.Tensor:
        return slot_mapping.compute_slot_mappings(
            batch.tables,
            *batch_arguments,
            block_sizes=batch.block_sizes,
            enabled=enabled,
            out=out,
        )

    return Workload(name, by_table, by_ranges)


def tables_of(name: str, batch: Batch) -> Workload:
    """Attention's table of a batch of one group."""
    width = max(len(ids) for ids in batch.rows[0])
    table = batch.block_table(0, width=width)
    requests = batch.idx_mapping.shape[0]
    out = torch.zeros((requests, width), dtype=torch.int32, device=table.device)
    tables = batch.tables

    def by_copy() -> torch.Tensor:
        return paged.gather_block_tables(
            table, tables.num_blocks[0], batch.idx_mapping, num_rows=requests, out=out
        )

    def by_ranges() -> torch.Tensor:
        return expansion.expand_block_tables(
            tables,
            batch.idx_mapping,
            group=0,
            num_rows=requests,
            out=out,
            block_size=BLOCK_SIZE,
        )

    return Workload(name, by_copy, by_ranges)


def run_checks() -> list[dict[str, Any]]:
    """Every case of ``kernel_checks.py`` on the GPU; the failures carry a message."""
    results = [
        _checked(name, functools.partial(kernel_checks.check_case, case, device="cuda"))
        for case, (name, _) in enumerate(kernel_checks.CASES)
    ]
    others = {"replayed graph": kernel_checks.check_graph, "block moves": check_moves}
    results += [
        _checked(name, functools.partial(check, device="cuda")) for name, check in others.items()
    ]
    passed = sum(1 for result in results if result["passed"])
    print(f"{passed} of {len(results)} checks against the reference passed", flush=True)
    return results


def run_timings(deadline: float) -> list[dict[str, Any]]:
    """All workloads, the two ways and the two backends in turn."""
    rows: list[dict[str, Any]] = []
    print(f"\n{'':44}{'launched, us':>30}{'replayed graph, us':>32}", flush=True)
    heads = "".join(f"{h:>11}" for h in ("paged", "tagma", "ratio") * 2)
    print(f"{'median (10th..90th percentile in the JSON)':44}{heads}", flush=True)
    workloads = itertools.chain(slot_workloads(), table_workloads(), _moves())
    for workload in workloads:
        if time.monotonic() > deadline:
            print("out of time: the remaining workloads were not timed", flush=True)
            rows.append({"name": "not timed for lack of time", "from": workload.name})
            break
        row: dict[str, Any] = {"name": workload.name}
        cells = ""
        for way, measure in (
            ("launched", kernel_timing.launched),
            ("replayed", kernel_timing.replayed),
        ):
            calls = workload.calls_per_sample
            times = {b: measure(getattr(workload, b), calls) for b in ("paged", "tagma")}
            row[way] = {backend: t._asdict() for backend, t in times.items()}
            ratio = times["tagma"].median / times["paged"].median
            cells += f"{times['paged'].median:11.2f}{times['tagma'].median:11.2f}{ratio:11.2f}"
        rows.append(row)
        print(f"{workload.name:44}{cells}", flush=True)
    return rows


def run_attention(deadline: float, *, dry: bool) -> dict[str, Any]:
    """Checks and times attention on each pool; prints a table and the decision."""
    device, shapes = ("cpu", attention_bench.TINY) if dry else ("cuda", attention_bench.SHAPES)
    measure = kernel_timing.on_host if dry else kernel_timing.long_call
    checks = attention_checks(device)
    ways = ("paged", "no table", "ranges", "flash", "expansion")
    print(f"\n{'attention of one layer, us':44}" + "".join(f"{w:>11}" for w in ways), flush=True)
    rows: list[dict[str, Any]] = []
    times: dict[tuple[str, str], dict[str, float]] = {}
    complete = True
    for workload in attention_bench.workloads(shapes, device):
        if time.monotonic() > deadline:
            print("out of time: the remaining shapes were not timed", flush=True)
            complete = False
            break
        name = f"{workload.shape.name}, {workload.pool}"
        checks.append(_checked(name, functools.partial(attention_bench.require_equal, workload)))
        calls = {**workload.ways}
        if workload.expansion is not None:
            calls["expansion"] = workload.expansion
        found = {way: measure(call, seconds=1.0) for way, call in calls.items()}
        rows.append({"name": name, **{way: t._asdict() for way, t in found.items()}})
        times[workload.shape.name, workload.pool] = {w: t.median for w, t in found.items()}
        cells = (f"{found[way].median:11.1f}" if way in found else f"{'':11}" for way in ways)
        print(f"{name:44}{''.join(cells)}", flush=True)
    lines = attention_bench.decision(times)
    print("\n" + "\n".join(lines), flush=True)
    return {"checks": checks, "timings": rows, "decision": lines, "complete": complete}


def attention_checks(device: str) -> list[dict[str, Any]]:
    """Tiny shapes, each way against the definition."""
    return [
        _checked(
            f"definition, {w.shape.name}, {w.pool}",
            functools.partial(attention_bench.require_equal, w, definition=True),
        )
        for w in attention_bench.workloads(attention_bench.TINY, device)
    ]


def _checked(name: str, check: Callable[[], None]) -> dict[str, Any]:
    """A check's result; a crash of one must not hide the others."""
    try:
        check()
    except Exception as error:
        print(f"FAILED  {name}: {error}", flush=True)
        return {"name": name, "passed": False, "error": f"{error!r}"}
    return {"name": name, "passed": True}


def main(arguments: list[str] | None = None) -> int:
    """Checks and timings; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vllm_tagma.lab.kernel_check.gpu_check")
    parser.add_argument("--out", type=Path, default=Path("build") / "gpu-check.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny, interpreted, no GPU")
    options = parser.parse_args(arguments)
    out = options.out
    if options.dry_run:
        return _written(out, {"device": "none", "attention": run_attention(math.inf, dry=True)})
    if not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} sees no CUDA device on this machine. Nothing "
            "was checked or timed. It needs a CUDA GPU and Python with torch and Triton.",
            file=sys.stderr,
        )
        return NO_CUDA
    began = time.monotonic()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "block_size": BLOCK_SIZE,
        "samples": kernel_timing.SAMPLES,
        "calls_per_sample": kernel_timing.INNER,
        "unit": "microseconds per call",
    }
    print(f"{report['device']}, torch {report['torch']}, Triton {report['triton']}", flush=True)
    report["checks"] = run_checks()
    report["timings"] = run_timings(began + SECONDS)
    report["attention"] = run_attention(began + ALL_SECONDS, dry=False)
    report["seconds"] = round(time.monotonic() - began, 1)
    return _written(out, report)


def _written(out: Path, report: dict[str, Any]) -> int:
    """Writes the report; the exit status that follows from it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {out}")
    checks = [*report.get("checks", []), *report["attention"]["checks"]]
    complete = all("launched" in row for row in report.get("timings", []))
    complete &= report["attention"]["complete"]
    return 0 if complete and all(check["passed"] for check in checks) else FAILED


if __name__ == "__main__":
    sys.exit(main())
