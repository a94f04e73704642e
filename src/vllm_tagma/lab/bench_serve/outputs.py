"""Whether both backends answered the same requests with the same text, at temperature 0.

Requests sent one by one are computed in batches of one on both sides, so their answers must be
identical; a difference there is an error of a backend. Under concurrency the batch that a request
is computed in depends on arrival times, and with it the rounding of matrix products, so that a
greedy choice between two nearly equal tokens may fall differently from run to run. For those stages
the runs of the paged backend among themselves are the yardstick.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from vllm_tagma.lab.bench_serve.record import RunRecord
from vllm_tagma.lab.bench_serve.serve_plan import OUTPUTS
from vllm_tagma.lab.bench_serve.serve_settings import BACKENDS


class Agreement(NamedTuple):
    """Answers of a stage. ``requests``: how many each run has; ``across``: requests that some paged
    and some tagma run answered differently; ``within``: by backend, requests that two of its own
    runs answered differently (None with one run). ``first``: the first request that differs
    across, with both texts."""

    stage: str
    requests: int
    across: int
    within: dict[str, int | None]
    first: tuple[int, str, str] | None

    @property
    def is_identical(self) -> bool:
        """Whether all runs of both backends gave the same texts.

        A backend that differs from itself differs from at least one run of the other as well.
        """
        return self.across == 0

    @property
    def must_be_identical(self) -> bool:
        """Whether the requests were sent one by one."""
        return self.stage == OUTPUTS


def texts_of(folder: Path, stage: str) -> list[str] | None:
    """The answers of a stage of a run, in the order of the requests; None if there are none."""
    try:
        document = json.loads((folder / f"{stage}.json").read_text(encoding="utf-8"))
        texts = document["generated_texts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [str(text) for text in texts]


def agreement(folder: Path, runs: Sequence[RunRecord], *, stage: str) -> Agreement | None:
    """Compares a stage over all complete runs; None unless both backends have answers."""
    answers: dict[str, list[list[str]]] = {backend: [] for backend in BACKENDS}
    for run in runs:
        if run.pair is not None and run.is_complete:
            texts = texts_of(folder / "runs" / run.name, stage)
            if texts is not None:
                answers[run.backend].append(texts)
    paged, tagma = (answers[backend] for backend in BACKENDS)
    if not paged or not tagma:
        return None
    requests = max(len(texts) for texts in paged + tagma)
    differing = {
        index: pair
        for ours in tagma
        for theirs in paged
        for index, pair in _differing(theirs, ours, requests)
    }
    first = min(differing, default=None)
    return Agreement(
        stage=stage,
        requests=requests,
        across=len(differing),
        within={backend: _within(answers[backend], requests) for backend in BACKENDS},
        first=None if first is None else (first, *differing[first]),
    )


def _within(answers: Sequence[list[str]], requests: int) -> int | None:
    if len(answers) < 2:
        return None
    return len({i for a, b in combinations(answers, 2) for i, _ in _differing(a, b, requests)})


def _differing(
    a: Sequence[str], b: Sequence[str], requests: int
) -> list[tuple[int, tuple[str, str]]]:
    """Indices with both texts where two runs differ; an answer that is missing differs."""
    padded = [list(texts) + ["(no answer)"] * (requests - len(texts)) for texts in (a, b)]
    return [
        (index, pair) for index, pair in enumerate(zip(*padded, strict=True)) if pair[0] != pair[1]
    ]
