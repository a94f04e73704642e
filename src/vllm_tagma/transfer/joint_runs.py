"""Which blocks of a transfer adjoin on both sides, and so travel as one piece.

A transfer pairs local blocks with remote ones. Two pairs are one piece of memory on each side if
the second's blocks follow the first's on both. The order in which pairs are listed means nothing to
a transfer, so a stretch that both sides hold backwards (what eviction in age order leaves) is one
run as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class JointRuns(NamedTuple):
    """Runs by ascending local block: ``counts[i]`` blocks from ``local[i]`` and ``remote[i]`` on.

    Three int64 arrays of one length.
    """

    local: Ids
    remote: Ids
    counts: Ids

    @property
    def num_runs(self) -> int:
        return len(self.counts)


def joint_runs(local: npt.ArrayLike, remote: npt.ArrayLike) -> JointRuns:
    """The fewest runs that pair ``local[i]`` with ``remote[i]`` for each i.

    Block ids in any order; a local block may be listed once only, as the target of a transfer is,
    or the runs are correct but not the fewest. O(blocks), and O(blocks log blocks) if the local ids
    do not ascend.

    Raises:
        ValueError: the two sides are not lists of the same length.
    """
    ours = np.ascontiguousarray(local, dtype=np.int64)
    theirs = np.ascontiguousarray(remote, dtype=np.int64)
    if ours.shape != theirs.shape or ours.ndim != 1:
        raise ValueError(f"{ours.shape} local blocks are paired with {theirs.shape} remote ones")
    if not len(ours):
        return JointRuns(ours, theirs, np.zeros(0, dtype=np.int64))
    step = np.diff(ours)
    if len(step) and step.min() < 0:
        order = np.argsort(ours, kind="stable")
        ours, theirs = ours[order], theirs[order]
        step = np.diff(ours)
    breaks = np.flatnonzero((step != 1) | (np.diff(theirs) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(ours)])))
    return JointRuns(ours[starts], theirs[starts], counts)
