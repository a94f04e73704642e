"""The self-test's second half: every slot of the first steps of real work, against the ids.

What a kernel wrote for a step is copied to the host behind it and compared when it has arrived, so
no step waits. By then the rows may have changed; what they held is kept with the copy. Requests of
the step are served meanwhile: a difference ends the engine a step or two later, not in time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from vllm_tagma.errors import InvariantError
from vllm_tagma.ranges import PAD_SLOT_ID, Range
from vllm_tagma.worker.self_test import described, slots_of

_MOST_WAITING: Final = 4

_logger = logging.getLogger("vllm.tagma.worker")


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A step's tensors on the host, or on their way there, and the ranges of its rows by group."""

    index: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: Sequence[Sequence[Sequence[Range]]]
    arrived: torch.cuda.Event | None


class FirstSteps:
    """Compares the slots of so many steps, or of all if ``steps`` is None."""

    def __init__(self, steps: int | None, name_row: Callable[[int], str]) -> None:
        self.compared = 0
        self._left = steps
        self._name_row = name_row
        self._waiting: list[_Copy] = []

    @property
    def is_over(self) -> bool:
        """Whether all steps have been compared."""
        return self._left == 0 and not self._waiting

    def look(
        self,
        *,
        index: torch.Tensor,
        starts: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: Callable[[], Sequence[Sequence[Sequence[Range]]]],
        block_sizes: Sequence[int],
        enabled: Sequence[bool],
    ) -> None:
        """Takes the slots of a step, and compares those of earlier ones that have arrived.

        ``index``, ``starts``, ``positions``, ``slots``: of the slot mapping. ``rows``: gives the
        ranges of each row by group. Raises ``InvariantError`` at the first slot that differs. Does
        not wait, unless several copies are on their way.
        """
        device = slots.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self._left != 0:
            self._left = None if self._left is None else self._left - 1
            requests = index.shape[0]
            parts = (index, starts[: requests + 1], positions, slots)
            on_host = [_to_host(part) for part in parts]
            arrived = None
            if device.type == "cuda":
                arrived = torch.cuda.Event()
                arrived.record(torch.cuda.current_stream(device))
            self._waiting.append(
                _Copy(
                    index=on_host[0],
                    starts=on_host[1],
                    positions=on_host[2],
                    slots=on_host[3],
                    rows=rows(),
                    arrived=arrived,
                )
            )
        while self._waiting:
            first = self._waiting[0]
            if first.arrived is not None and not first.arrived.query():
                if len(self._waiting) <= _MOST_WAITING:
                    break
                first.arrived.synchronize()
            self._compare(self._waiting.pop(0), block_sizes, enabled, device)
        if self.is_over:
            _logger.info("self-test: all slots of the first %d steps equal the ids", self.compared)

    def _compare(
        self, copy: _Copy, block_sizes: Sequence[int], enabled: Sequence[bool], device: torch.device
    ) -> None:
        starts = copy.starts.numpy()
        positions = copy.positions.numpy()
        for group, size in enumerate(block_sizes):
            if not enabled[group]:
                continue
            slots = copy.slots[group].numpy()
            for request, row in enumerate(copy.index.tolist()):
                at = slice(int(starts[request]), int(starts[request + 1]))
                ids = (
                    np.concatenate([_ids(r) for r in copy.rows[group][row]] or [_NONE])
                    if row >= 0
                    else _NONE
                )
                expected = slots_of(ids, positions[at], size)
                wrong = np.flatnonzero(slots[at] != expected)
                if len(wrong):
                    token = int(wrong[0])
                    raise InvariantError(
                        f"self-test, slot mapping on {described(device)}: {self._name_row(row)}, "
                        f"position {int(positions[at][token])}: slot {int(slots[at][token])} by "
                        f"the kernel, {int(expected[token])} by the ids ({len(wrong)} of "
                        f"{len(expected)} differ, step {self.compared}). Please report this with "
                        "the model and the flags, and serve with --kv-cache-backend paged."
                    )
            tail = slots[int(starts[-1]) :]
            if (tail != PAD_SLOT_ID).any():
                raise InvariantError(
                    f"self-test, slot mapping on {described(device)}: slots behind the step's "
                    f"tokens are not {PAD_SLOT_ID} (step {self.compared}). Please report this, and "
                    "serve with --kv-cache-backend paged."
                )
        self.compared += 1


_NONE: Final = np.zeros(0, dtype=np.int64)


def _ids(of: Range) -> np.ndarray:
    if of.start == 0:
        return np.zeros(of.num_blocks, dtype=np.int64)
    return np.arange(of.start, of.start + of.num_blocks, dtype=np.int64)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
