"""The start-up self-test: what a worker's kernels write, compared with plain numpy, by name.

Kernels are proven by tests on the machines that ran them. Here they are run where they will serve,
on random rows with the model's own shapes, before the first request: a compiler, a driver or a card
that gets one wrong stops the start and is named. What it does not prove is said in
``docs/self-test.md``.

A check is a name and a function that raises ``Difference``. ``self_test_device.py`` has those of
Model Runner V2, ``self_test_host.py`` those of V1, ``self_test_moves.py`` the one of both; a part
that is chosen at start-up adds its own to the list that it hands to ``run_checks``.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_tagma.errors import SelfTestError
from vllm_tagma.ranges import MAX_RANGES, NULL_BLOCK, PAD_SLOT_ID
from vllm_tagma.worker.block_mover import Mover

BUDGET_SECONDS: Final = 3.0
"""Above it a warning says so; a kernel that has to be compiled first may need longer once."""

ROWS: Final = 6
_MOST_BLOCKS: Final = 4096
_MOST_TOKENS: Final = 8192
_SEED: Final = 20

_logger = logging.getLogger("vllm.tagma.worker")

Ids = npt.NDArray[np.int64]


class Difference(Exception):
    """What a kernel wrote is not what the reference says; the text has the first difference."""


class Check(NamedTuple):
    """``name``: the kernel in words, as a report should have it."""

    name: str
    run: Callable[[Subject], None]


class Batch(NamedTuple):
    """A step: some rows' last tokens, and stretches of positions of others.

    ``rows``: int32, of each request. ``starts``: int32 [requests + 1].
    ``positions``: int64 [tokens].
    """

    rows: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is tested: the shapes of a runner's tables, and its caches.

    ``block_sizes``, ``widths``: tokens of a block, and blocks of a row, by group. ``rows``,
    ``max_tokens``: of the runner. ``kv_caches``: [num_blocks * k, ...] each, of which a few blocks
    are written and zeroed again.
    """

    device: torch.device
    block_sizes: Sequence[int]
    widths: Sequence[int]
    rows: int
    max_tokens: int
    kv_caches: Sequence[torch.Tensor]
    num_blocks: int
    mover: Mover | None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(_SEED))

    @cached_property
    def ids(self) -> list[list[Ids]]:
        """Random block ids by group and row: few ranges and many, null runs, a full row."""
        return [[self._row(group, row) for row in range(self.num_rows)] for group in self.groups]

    @property
    def groups(self) -> range:
        """Of KV caches."""
        return range(len(self.block_sizes))

    @property
    def num_rows(self) -> int:
        """Rows that are tested."""
        return min(self.rows, ROWS)

    def _row(self, group: int, row: int) -> Ids:
        """Ids of a row; the first is as long as it may be, and in as many ranges."""
        most = min(self.widths[group], _MOST_BLOCKS)
        length = most if row == 0 else int(self.rng.integers(1, most + 1))
        # A piece that is longer than the pool ends in null blocks, which are a range more.
        many = MAX_RANGES - 2 if length < self.num_blocks else MAX_RANGES // 2 - 2
        pieces = min((many, 1, 7)[row % 3], length)
        cuts = np.sort(self.rng.choice(np.arange(1, length), pieces - 1, replace=False))
        ids = np.zeros(length, dtype=np.int64)
        for first, last in zip([0, *cuts], [*cuts, length], strict=True):
            count = min(last - first, max(self.num_blocks - 1, 1))
            start = int(self.rng.integers(1, max(self.num_blocks - count, 1) + 1))
            ids[first : first + count] = np.arange(start, start + count)
        if row % 3 == 2:  # below a window
            ids[: length // 3] = NULL_BLOCK
        return ids

    @cached_property
    def batch(self) -> Batch:
        """Decodes and prefills over the rows in a random order."""
        index, counts, positions = [], [], []
        left = min(self.max_tokens, _MOST_TOKENS)
        for row in self.rng.permutation(self.num_rows):
            reach = min(
                len(ids[row]) * size for ids, size in zip(self.ids, self.block_sizes, strict=True)
            )
            decodes = bool(self.rng.integers(2)) and row
            tokens = min(1 if decodes else reach, max(left, 1))
            left -= tokens
            first = reach - tokens if decodes else int(self.rng.integers(0, reach - tokens + 1))
            index.append(int(row))
            counts.append(tokens)
            positions.append(np.arange(first, first + tokens, dtype=np.int64))
            if left <= 0:
                break
        return Batch(
            np.array(index, dtype=np.int32),
            np.cumsum([0, *counts], dtype=np.int32),
            np.concatenate(positions),
        )

    def slots(self, group: int) -> npt.NDArray[np.int64]:
        """What a slot mapping must write for the batch, from the ids alone: int64 [tokens]."""
        starts, positions = self.batch.starts, self.batch.positions
        return np.concatenate(
            [
                slots_of(
                    self.ids[group][row],
                    positions[starts[i] : starts[i + 1]],
                    self.block_sizes[group],
                )
                for i, row in enumerate(self.batch.rows)
            ]
        )


def slots_of(ids: Ids, positions: npt.NDArray[np.int64], block_size: int) -> Ids:
    """Slots of positions of a row, from its block ids; -1 outside them and in null blocks."""
    block = positions // block_size
    inside = (positions >= 0) & (block < len(ids))
    padded = np.append(ids, NULL_BLOCK)
    found = padded[np.where(inside, block, len(ids))]
    return np.where(found == NULL_BLOCK, PAD_SLOT_ID, found * block_size + positions % block_size)


def require_same(what: str, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Raises ``Difference`` with the first of the elements that differ."""
    wrong = np.argwhere(found != expected)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise Difference(
            f"{what} {list(at) if len(at) > 1 else at[0]}: {found[at]} by the kernel, "
            f"{expected[at]} by the reference; {len(wrong)} of {found.size} differ"
        )


def run_checks(checks: Sequence[Check], subject: Subject) -> dict[str, float]:
    """Runs all checks and logs one line; returns the seconds of each.

    Raises ``SelfTestError`` naming every check that found a difference or failed.
    """
    seconds: dict[str, float] = {}
    failures = []
    for check in checks:
        begin = time.perf_counter()
        try:
            check.run(subject)
        except Difference as difference:
            failures.append(f"{check.name}: {difference}")
        except Exception as error:  # of the kernel or its compiler, whatever it may be
            _logger.exception("self-test: %s failed", check.name)
            failures.append(f"{check.name}: failed with {error!r}")
        seconds[check.name] = time.perf_counter() - begin
    if failures:
        raise SelfTestError(
            f"the self-test found {len(failures)} of {len(checks)} kernels wrong on "
            f"{described(subject.device)}.\n  " + "\n  ".join(failures) + "\nServing would write "
            "KV to wrong places, so the start ends here. Please report these lines to the project "
            "with the model and the flags, and serve with --kv-cache-backend paged meanwhile."
        )
    total = sum(seconds.values())
    _logger.log(
        logging.INFO if total <= BUDGET_SECONDS else logging.WARNING,
        "self-test passed on %s in %.2f s (budget %.0f s): %s",
        described(subject.device),
        total,
        BUDGET_SECONDS,
        ", ".join(f"{name} {spent:.2f} s" for name, spent in seconds.items()),
    )
    return seconds


def described(device: torch.device) -> str:
    """The device and the versions that make its kernels, for a report."""
    if device.type != "cuda":
        return f"{device.type} ({platform.machine()}, torch {torch.__version__})"
    major, minor = torch.cuda.get_device_capability(device)
    import triton

    return (
        f"{torch.cuda.get_device_name(device)} (capability {major}.{minor}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__})"
    )
