"""States of the pool's blocks over time, few enough to draw.

A fixed set of block ids is looked at in every so many steps; when there are too many columns, every
other one is dropped and the interval doubles, so neither the pool nor the replay can be too long.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tagma.lab.replay.drive import Replay

HOLE, CACHED, FIRST_REQUEST = 0, 1, 2
"""States: free and not cached; cached and idle; from the third on a request's index is added."""

HEIGHT = 400
DETAIL_HEIGHT = 240
MAX_COLUMNS = 800


class PoolSampler:
    """Collects columns of block states; give it to the replay as ``on_step``."""

    def __init__(self, num_blocks: int, *, max_columns: int = MAX_COLUMNS) -> None:
        # Block 0 is vLLM's null block.
        self.whole = np.unique(np.linspace(1, num_blocks - 1, HEIGHT).astype(np.int64))
        """Block ids spread over the pool: one in so many."""
        first = 1 + max(0, (num_blocks - 1 - DETAIL_HEIGHT) // 2)
        self.detail = np.arange(first, min(first + DETAIL_HEIGHT, num_blocks))
        """Neighbouring block ids from the middle of the pool."""
        self._looked_at = np.concatenate((self.whole, self.detail))
        self.steps: list[int] = []
        self._columns: list[npt.NDArray[np.int64]] = []
        self._owner = np.empty(num_blocks, dtype=np.int64)
        self._max_columns = max_columns
        self._interval = 1

    def __call__(self, replay: Replay) -> None:
        """Takes a column if this step's turn has come. O(pool) then."""
        if replay.step % self._interval:
            return
        self.steps.append(replay.step)
        self._columns.append(self._column(replay))
        if len(self.steps) >= self._max_columns:
            del self.steps[1::2], self._columns[1::2]
            self._interval *= 2

    def images(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """States of ``whole`` and of ``detail``, int64 [blocks looked at, columns]."""
        states = np.array(self._columns).T
        return states[: len(self.whole)], states[len(self.whole) :]

    def _column(self, replay: Replay) -> npt.NDArray[np.int64]:
        owner, view = self._owner, replay.view
        owner.fill(-1)
        for request in replay.scheduler.running:
            # A shared block shows the request admitted last.
            owner[view.row_ids(request.request_id)] = int(request.request_id)
        column: npt.NDArray[np.int64] = owner[self._looked_at]
        for place in np.flatnonzero(column < 0):
            cached = view.is_cached(int(self._looked_at[place]))
            column[place] = (CACHED if cached else HOLE) - FIRST_REQUEST
        column += FIRST_REQUEST
        return column
