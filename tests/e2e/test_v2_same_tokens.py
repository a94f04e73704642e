"""The real model through Model Runner V2 on both backends, under the Triton interpreter.

Slots come from the range kernel, attention's tables from the expansion kernel. In the first half
of the workload (v2_engine_run.py) the rows of ids are not written at all; in the second, where
requests are preempted, they are, and each slot is compared with them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1900)]

Reports = dict[str, dict[str, Any]]
HERE = Path(__file__).parent
V2_RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"


def run_engine(
    backend: str, model: Path, environment: dict[str, str], out: Path
) -> subprocess.CompletedProcess[str]:
    environment = {
        **environment,
        "PYTHONPATH": str(HERE.parent / "triton_interpreter"),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    return run_script("v2_engine_run.py", backend, model, out, environment=environment, timeout=900)


@pytest.fixture(scope="module")
def v2_reports(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    """What each backend saw, by backend name."""
    folder = tmp_path_factory.mktemp("v2_same_tokens")
    environment = {**engine_environment, "TRITON_INTERPRET": "1"}
    reports = {}
    for backend in ("paged", "tagma"):
        out = folder / f"{backend}.json"
        run = run_engine(backend, model, environment, out)
        assert run.returncode == 0, f"{backend} engine failed:\n{run.stdout[-6000:]}"
        reports[backend] = json.loads(out.read_text())
    return reports


def test_each_run_used_v2_and_its_backend(v2_reports: Reports) -> None:
    for report in v2_reports.values():
        assert V2_RUNNER in report["runner"]
    assert v2_reports["paged"]["block_tables"] == "BlockTables"
    assert v2_reports["tagma"]["block_tables"] == "TagmaBlockTables"
    ours = "vllm_tagma.integration.worker_v2.TagmaV2CPUModelRunner"
    assert v2_reports["tagma"]["runner"][0] == ours


def test_workload_covers_what_it_claims(v2_reports: Reports) -> None:
    for report in v2_reports.values():
        assert report["preemptions"] >= 2
        assert report["chunked"] >= 2
        assert sum(r["cached"] > 0 for r in report["requests"].values()) >= 2
    assert v2_reports["tagma"]["max_ranges"] > 1, "the search among ranges must run"


def test_tokens_and_hits_are_identical(v2_reports: Reports) -> None:
    assert v2_reports["tagma"]["requests"] == v2_reports["paged"]["requests"]


def test_schedules_are_identical(v2_reports: Reports) -> None:
    for key in ("steps", "preemptions", "chunked", "usage_after_drain"):
        assert v2_reports["paged"][key] == v2_reports["tagma"][key], key


def test_every_slot_equals_the_rows_of_ids(v2_reports: Reports) -> None:
    report = v2_reports["tagma"]
    audited = [r for name, r in report["requests"].items() if name.startswith("pressure")]
    assert len(audited) == 6
    written = sum(r["prompt_tokens"] - r["cached"] + len(r["tokens"]) - 1 for r in audited)
    assert report["slot_audit"]["slots"] > written  # and what preempted requests wrote again
    assert report["slot_audit"]["padded"] == 0
