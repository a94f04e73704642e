"""Blocks that change places before every step, on both runners: the same KV, the same tokens.

The permutations (block_shuffle.py) stand outside the policy of compaction: they show that a worker
follows any move, those of shared and of unscheduled requests included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_script

from vllm_tagma.lab.bench.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
Report = dict[str, Any]

RUNNERS = {
    "v1": "vllm_tagma.integration.worker_v1.TagmaCPUModelRunner",
    "v2": "vllm_tagma.integration.worker_v2.TagmaV2CPUModelRunner",
}


class Runs:
    """What moves_engine_run.py reports for a runner, each mode run once."""

    def __init__(self, model: Path, environment: dict[str, str], folder: Path) -> None:
        self._model, self._environment, self._folder = model, environment, folder
        self._reports: dict[tuple[str, str], Report] = {}

    def __call__(self, runner: str, mode: str) -> Report:
        if (runner, mode) not in self._reports:
            self._reports[runner, mode] = self._run(runner, mode)
        return self._reports[runner, mode]

    def _run(self, runner: str, mode: str) -> Report:
        environment, model = dict(self._environment), self._model
        if runner == "v2":
            environment.update(
                PYTHONPATH=str(HERE.parent / "triton_interpreter"),
                TRITON_INTERPRET="1",
                VLLM_USE_V2_MODEL_RUNNER="1",
            )
            model = self._folder
            write_tiny_model(model, max_position_embeddings=1024, torch_dtype="bfloat16")
        out = self._folder / f"{runner}_{mode}.json"
        more = ["core"] if mode == "core" else []
        run = run_script(
            "moves_engine_run.py", model, out, *more, environment=environment, timeout=600
        )
        assert run.returncode == 0, f"{runner} engine failed:\n{run.stdout[-6000:]}"
        found: Report = json.loads(out.read_text())
        assert found["runner"] == RUNNERS[runner]
        return found


@pytest.fixture(scope="module")
def runs(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    return Runs(model, engine_environment, tmp_path_factory.mktemp("moves"))


@pytest.fixture(params=list(RUNNERS))
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def report(runs: Runs, runner: str) -> Report:
    """Blocks permuted under vLLM's own manager."""
    return runs(runner, "shuffle")


def test_blocks_moved_in_every_step(report: Report) -> None:
    """Each way to meet a move occurred, or the comparison is idle."""
    moves, passes = report["moves"], (report["at_rest"], report["moving"])
    assert moves["steps"] == len(report["moving"]["digests"]) >= 50
    assert moves["cycles"] > moves["steps"], "chains, swaps and cycles"
    assert moves["rows"] > moves["steps"], "rows of running requests"
    assert moves["unscheduled"] >= 5, "rows of requests that sat the step out"
    for seen in passes:
        assert seen["preemptions"] >= 1
        assert any(output["cached"] for output in seen["outputs"].values())


def test_tokens_and_hits_are_identical(report: Report) -> None:
    assert report["moving"]["outputs"] == report["at_rest"]["outputs"]
    assert len(report["at_rest"]["outputs"]) >= 9
    assert report["moving"]["preemptions"] == report["at_rest"]["preemptions"]


def test_kv_of_each_request_is_identical_after_each_step(report: Report) -> None:
    """Bit for bit, in every full block of every running request."""
    rest, moving = report["at_rest"]["digests"], report["moving"]["digests"]
    assert len(rest) == len(moving)
    wrong = [step for step, pair in enumerate(zip(rest, moving, strict=True)) if pair[0] != pair[1]]
    assert wrong == []
    blocks = [int(d.partition(":")[0]) for step in rest for d in step.values()]
    assert sum(blocks) > 100


def test_every_slot_equals_the_rows_of_ids(report: Report) -> None:
    steps = len(report["at_rest"]["digests"]) + len(report["moving"]["digests"])
    assert report["slot_audit"]["batches"] >= steps
    assert report["slot_audit"]["padded"] == 0


def test_the_pools_own_moves_change_no_token(runs: Runs, runner: str) -> None:
    """Compaction ``live`` in a pool that is too small, and a row relocated in every step: the
    tokens are those of stock scheduler and manager with blocks at rest."""
    stock, ours = runs(runner, "shuffle")["at_rest"], runs(runner, "core")
    tokens = {name: output["tokens"] for name, output in stock["outputs"].items()}
    assert {name: out["tokens"] for name, out in ours["moving"]["outputs"].items()} == tokens
    assert ours["moves"]["steps"] >= 40
    assert ours["moves"]["copies"] >= ours["moves"]["steps"]
    assert ours["moves"]["rows"] >= ours["moves"]["steps"] // 2
    assert ours["slot_audit"]["batches"] >= ours["moves"]["steps"]
    assert ours["slot_audit"]["padded"] == 0
