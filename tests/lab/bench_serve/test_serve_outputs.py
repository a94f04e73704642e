"""Which answers agree: across the backends, and of each with itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_tagma.lab.bench_serve.outputs import agreement
from vllm_tagma.lab.bench_serve.record import RunRecord

NAMES = ["01-paged", "02-tagma", "03-tagma", "04-paged"]


@pytest.fixture
def compared(tmp_path: Path):
    def compare(*answers: list[str] | None, stage: str = "outputs", failed: str = ""):
        runs = []
        for index, (name, texts) in enumerate(zip(NAMES, answers, strict=False), start=1):
            folder = tmp_path / "runs" / name
            folder.mkdir(parents=True)
            if texts is not None:
                (folder / f"{stage}.json").write_text(json.dumps({"generated_texts": texts}))
            backend = name.partition("-")[2]
            error = "died" if name == failed else None
            runs.append(
                RunRecord(
                    index=index,
                    name=name,
                    backend=backend,
                    pair=(index - 1) // 2,
                    started="",
                    error=error,
                )
            )
        return agreement(tmp_path, runs, stage=stage)

    return compare


def test_identical(compared) -> None:
    found = compared(["a", "b"], ["a", "b"], ["a", "b"], ["a", "b"])
    assert found.is_identical
    assert found.must_be_identical
    assert (found.requests, found.across, found.first) == (2, 0, None)
    assert found.within == {"paged": 0, "tagma": 0}


def test_a_difference_in_one_run_counts_once(compared) -> None:
    found = compared(["a", "b", "c"], ["a", "b", "c"], ["a", "X", "c"], ["a", "b", "c"])
    assert not found.is_identical
    assert found.across == 1
    assert found.within == {"paged": 0, "tagma": 1}
    assert found.first == (1, "b", "X")


def test_a_backend_that_differs_from_itself_is_not_identical(compared) -> None:
    found = compared(["a"], ["a"], ["a"], ["Y"], stage="chat-c4")
    assert not found.is_identical
    assert found.within == {"paged": 1, "tagma": 0}
    assert not found.must_be_identical


def test_a_missing_answer_differs(compared) -> None:
    found = compared(["a", "b"], ["a"])
    assert found.across == 1
    assert found.first == (1, "b", "(no answer)")
    assert found.within == {"paged": None, "tagma": None}


def test_failed_runs_and_one_sided_series_are_not_compared(compared) -> None:
    assert compared(["a"], ["b"], ["a"], ["a"], failed="02-tagma").across == 0


def test_nothing_to_compare(compared) -> None:
    assert compared(["a"], None) is None
