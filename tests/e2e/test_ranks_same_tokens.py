"""Two ranks, by tensors and by stages: each rank follows every row and every move, in order.

Stock vLLM with blocks at rest against tagma with blocks moving in every step and one rank, then the
other, late by tens of milliseconds (ranks_engine_run.py). Equal schedules make equal batches, so
the KV of each rank has to be equal bit for bit, wherever its blocks lie.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_script
from seeded_model import write_seeded_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

Report = dict[str, Any]
KINDS = ("tensor", "pipeline")


class Runs:
    """What ranks_engine_run.py reports for each kind, run once."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment, self._folder = environment, folder
        self._reports: dict[str, Report] = {}

    def __call__(self, kind: str) -> Report:
        if kind not in self._reports:
            self._reports[kind] = self._run(kind)
        return self._reports[kind]

    def _run(self, kind: str) -> Report:
        out = self._folder / f"{kind}.json"
        run = run_script(
            "ranks_engine_run.py",
            kind,
            self._folder,
            out,
            environment=self._environment,
            timeout=500,
        )
        assert run.returncode == 0, f"{kind}: the engine failed:\n{run.stdout[-6000:]}"
        found: Report = json.loads(out.read_text())
        return found


@pytest.fixture(scope="module")
def runs(engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    write_seeded_model(folder)
    return Runs(engine_environment, folder)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def report(runs: Runs, kind: str) -> Report:
    return runs(kind)


@pytest.fixture
def stock(report: Report) -> Report:
    (found,) = report["paged"]
    return dict(found)


@pytest.fixture(params=[1, 0], ids=["rank-1-slow", "rank-0-slow"])
def slow(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def tagma(report: Report, slow: int) -> Report:
    return dict(report["tagma"][(1, 0).index(slow)])


def test_the_workload_covers_what_it_claims(kind: str, report: Report, tagma: Report) -> None:
    assert (
        report["paged_in_flight"] == report["tagma_in_flight"] == {"tensor": 1, "pipeline": 2}[kind]
    )
    workers = {(rank["worker"], rank["table"]) for rank in tagma["ranks"]}
    assert workers == {("vllm_tagma.integration.worker_v1.TagmaCPUWorker", "TagmaBlockTable")}
    assert tagma["scheduler"]["preemptions"] >= 1
    assert len(tagma["outputs"]) >= 10
    assert any(output["cached"] for output in tagma["outputs"].values())
    assert tagma["moves"]["steps"] >= 40
    assert tagma["moves"]["rows"] >= tagma["moves"]["steps"] // 2


def test_stock_ran_stock(stock: Report) -> None:
    assert [rank["worker"] for rank in stock["ranks"]] == [
        "vllm.v1.worker.cpu_worker.CPUWorker"
    ] * 2
    assert {rank["table"] for rank in stock["ranks"]} == {"BlockTable"}
    assert stock["moves"]["copies"] == 0


def test_tokens_and_hits_are_identical(stock: Report, tagma: Report) -> None:
    assert tagma["outputs"] == stock["outputs"]
    assert len(tagma["scheduler"]["steps"]) == len(stock["scheduler"]["steps"])
    assert tagma["scheduler"]["preemptions"] == stock["scheduler"]["preemptions"]


def test_each_rank_holds_the_schedulers_rows_in_every_step(tagma: Report) -> None:
    """In order: the k-th step of a rank has the rows of the k-th step that was sent."""
    sent = [step["ids"] for step in tagma["scheduler"]["steps"]]
    for rank in tagma["ranks"]:
        held = [step["ids"] for step in rank["steps"]]
        assert len(held) == len(sent)
        wrong = [at for at, pair in enumerate(zip(sent, held, strict=True)) if pair[0] != pair[1]]
        assert wrong == [], f"rank {rank['rank']}"


def test_kv_of_each_rank_is_identical_after_each_step(stock: Report, tagma: Report) -> None:
    for rest, moving in zip(stock["ranks"], tagma["ranks"], strict=True):
        pairs = zip(rest["steps"], moving["steps"], strict=True)
        wrong = [at for at, (a, b) in enumerate(pairs) if a["digests"] != b["digests"]]
        assert wrong == [], f"rank {rest['rank']}"
    blocks = [int(d.partition(":")[0]) for s in moving["steps"] for d in s["digests"].values()]
    assert sum(blocks) > 300


def test_a_rank_was_late(tagma: Report, slow: int) -> None:
    """The slow rank began steps late that had been sent."""
    sent = [step["sent"] for step in tagma["scheduler"]["steps"]]
    steps = tagma["ranks"][slow]["steps"]
    late = sum(step["began"] - at > 0.005 for at, step in zip(sent, steps, strict=True))
    assert late >= len(sent) // 10
    if slow == 1:  # of rank 0 vLLM awaits the answer, so it cannot fall behind by a step
        behind = zip(steps, sent[1:], strict=False)
        assert sum(step["ended"] > after for step, after in behind) >= len(sent) // 10


def test_blocks_moved_and_changed_hands_in_flight(kind: str, tagma: Report) -> None:
    """While a step that reads or writes them was not done; with stages only."""
    seen = tagma["scheduler"]
    if kind == "tensor":
        assert seen["overlaps"] == 0
        return
    assert seen["overlaps"] >= len(seen["steps"]) // 2
    assert seen["moved_in_flight"] >= 20
    assert seen["reused_in_flight"] >= 1


def test_every_rank_audits_every_slot(tagma: Report) -> None:
    for rank in tagma["ranks"]:
        assert rank["slot_audit"]["batches"] >= len(rank["steps"])
        assert rank["slot_audit"]["padded"] == 0


def test_nothing_is_left(report: Report, stock: Report, tagma: Report) -> None:
    assert stock["usage"] == tagma["usage"] == 0
    assert report["pool"]["rows"] == report["pool"]["live_blocks"] == 0


def test_a_broken_law_on_any_rank_stops_the_engine_at_once(runs: Runs) -> None:
    """On a rank of which vLLM hears no exceptions; else it would wait for minutes."""
    broken = runs("tensor")["broken"]
    assert broken["error"]
    assert broken["seconds"] < 30
