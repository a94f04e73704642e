"""A worker's memory and rows in Python: it knows what steps tell it, and checks what it reads.

Each token of a request has a canary that names all it depends on: the tokens before it, salt,
adapter, images. A step copies blocks (all sources are read before a destination is written), writes
the rows that its row updates name, then the canaries of its tokens through the rows, in the order
of the batch, and then every scheduled request reads its whole context. Shared blocks pass only if
they hold what both expect; a hit on a block that was never written, a block with two owners, and a
move that the copies or the row did not follow do not.

The scheduler's rows are never asked for here: a row is what the updates say. The ids that vLLM
sends beside them must say the same; a scheduler that sends no updates (vLLM's) is followed by its
ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.request import Request

from vllm_tagma.row_update import RowUpdate


def row_key(name: str, group: int) -> str:
    """What the row of a request in a cache group is kept under."""
    return f"{name}/{group}" if group else name


def by_row(rows: Mapping[str, Sequence[list[int]]]) -> dict[str, list[int]]:
    """Rows of requests in all groups, each under its key."""
    return {row_key(name, g): ids for name, row in rows.items() for g, ids in enumerate(row)}


@dataclasses.dataclass
class Scheduled:
    """Tokens [start, end) of a request in one step; ``preemptions`` tells stale outputs apart."""

    request: Request
    start: int
    end: int
    preemptions: int

    def __post_init__(self) -> None:
        self._turn = self.request.num_prompt_tokens

    @property
    def dropped(self) -> bool:
        """A session was given its next input since: what this step writes does not count, and is
        written again."""
        return self.request.num_prompt_tokens != self._turn


@dataclasses.dataclass
class Step:
    """What a scheduler sends for one step, as ``SchedulerOutput`` carries it. Rows stand under
    their keys (``row_key``)."""

    copies: list[tuple[int, int]]
    updates: list[RowUpdate] | None  # None: the scheduler sends none
    gone: set[str]  # finished or preempted since the last step
    whole: dict[str, list[int]]  # ids of new and resumed requests
    more: dict[str, list[int]]  # ids of new blocks of running requests
    scheduled: list[Scheduled]

    def apply_to(self, rows: dict[str, list[int]]) -> int:
        """Changes a worker's rows; the number of rows in which a held block moved.

        Raises ``AssertionError`` for an update that does not fit its row or contradicts the ids.
        """
        for key in [key for key in rows if key.split("/")[0] in self.gone]:
            del rows[key]
        moved = 0
        updated = set()
        for request_id, group, first, ranges in self.updates or ():
            name = row_key(request_id, group)
            assert name not in updated, f"two updates of {name}"
            updated.add(name)
            assert name in rows or name in self.whole, f"{name} is not held by the worker"
            held = [] if name in self.whole else rows[name]
            row = held[:first] + ranges.ids()
            new = self.whole.get(name, self.more.get(name, []))
            assert first <= len(held), f"{name} holds {held}, its update begins at {first}"
            assert len(row) == len(held) + len(new), f"{name} holds {held} + {new}, not {row}"
            assert row[len(held) :] == new, f"{name} has {row}, and the ids beside it say {new}"
            # A window's head may have fallen out since.
            moved += any(now not in (0, was) for was, now in zip(held, row, strict=False))
            rows[name] = row
        sent = self.whole.keys() | self.more.keys()
        if self.updates is not None:
            assert sent <= updated, f"no update of {sent - updated}"
            return moved
        rows.update({name: list(ids) for name, ids in self.whole.items()})
        for name, ids in self.more.items():
            rows[name].extend(ids)  # so a list must never be sent twice
        return 0


class StepLog:
    """Collects a :class:`Step` while it is scheduled, as ``Scheduler.schedule`` does: whole rows
    are read when a request is admitted, ids are taken out at the end."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.begin()

    def begin(self) -> None:
        self._whole: dict[str, Any] = {}
        self._more: dict[str, Any] = {}

    def given(self, request: Request, new: Any, manager: Any) -> None:
        """``allocate_slots`` gave ``new`` blocks to a request that waits or runs."""
        if request.status == request.status.RUNNING:
            self._more[request.request_id] = new
        else:
            self._whole[request.request_id] = manager.get_blocks(request.request_id)

    def freed(self, request: Request) -> None:
        self._whole.pop(request.request_id, None)
        self._more.pop(request.request_id, None)
        self.gone.add(request.request_id)

    @property
    def whole(self) -> set[str]:
        """The requests whose whole row goes to the worker."""
        return set(self._whole)

    def step(
        self, copies: list[tuple[int, int]], updates: list[RowUpdate], scheduled: list[Scheduled]
    ) -> Step:
        gone, self.gone = self.gone, set()
        whole = by_row({name: blocks.get_block_ids() for name, blocks in self._whole.items()})
        more = by_row({name: blocks.get_block_ids() for name, blocks in self._more.items()})
        return Step(
            copies, updates, gone, whole, {n: ids for n, ids in more.items() if ids}, scheduled
        )


class KvWorker:
    """Executes steps in order; an ``AssertionError`` names what is not where it should be."""

    def __init__(
        self, *, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.windows = windows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.memory = np.zeros((num_blocks, block_size), dtype=np.int64)
        self.rows: dict[str, list[int]] = {}
        self.reads = self.copied = self.rows_moved = self.dropped = 0
        self._chains: dict[str, list[int]] = {}

    def execute(self, step: Step) -> None:
        self._copy(step.copies)
        self.rows_moved += step.apply_to(self.rows)
        groups = range(len(self.windows))
        for part in step.scheduled:
            self.dropped += part.dropped
            for group in groups:
                wanted = -1 if part.dropped else self._content(part.request, part.end, group)
                self._write(part, part.start, wanted, group)
        for part in step.scheduled:
            if part.request.num_preemptions == part.preemptions and not part.dropped:
                for group in groups:
                    self._read(part, group)

    def _write(self, part: Scheduled, first: int, content: Any, group: int) -> None:
        slots = self._slots(part, group)[first:]
        assert (slots >= self.block_size).all(), f"{part.request.request_id} writes a null block"
        self.memory.reshape(-1)[slots] = content if isinstance(content, int) else content[first:]

    def _content(self, request: Request, end: int, group: int) -> np.ndarray:
        """Canaries of one group: others' layers hold other KV."""
        return self.canaries(request, end) ^ group

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = [s for s, _ in copies], [d for _, d in copies]
        assert len(set(destinations)) == len(destinations), f"two copies into one block: {copies}"
        assert all(0 < block < self.num_blocks for block in sources + destinations)
        self.memory[destinations] = self.memory[sources]
        self.copied += len(copies)

    def _slots(self, part: Scheduled, group: int = 0) -> np.ndarray:
        row = np.array(self.rows[row_key(part.request.request_id, group)])
        position = np.arange(part.end)
        return row[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, part: Scheduled, group: int) -> None:
        """What the tokens of the step attend to: all before them, or a window."""
        window = self.windows[group]
        first = 0
        if window is not None:
            chunked = part.start - part.start % abs(window)
            first = max(part.start - window + 1, 0) if window > 0 else chunked
        held = self.memory.reshape(-1)[self._slots(part, group)]
        wrong = self._wrong(held, self._content(part.request, part.end, group))
        wrong = wrong[wrong >= first]
        assert not len(wrong), (
            f"{part.request.request_id} reads foreign KV at positions {wrong[:5]} of {part.end} in "
            f"group {group}, in blocks {self.rows[row_key(part.request.request_id, group)]} of "
            f"{self.block_size}"
        )
        self.reads += part.end - first

    def _wrong(self, held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Where what is held is not what is wanted."""
        return np.flatnonzero(held != wanted)

    def rewrite(self, request: Request, first: int, end: int) -> None:
        """Drafts that were confirmed: their KV was written, under tokens not known here."""
        part = Scheduled(request, first, end, request.num_preemptions)
        for group in range(len(self.windows)):
            self._write(part, first, self._content(request, end, group), group)

    def forget(self, request: Request, tokens: int) -> None:
        """The tokens from there on are replaced by others (a session's next input)."""
        del self._chains.get(request.request_id, [])[tokens:]

    def canaries(self, request: Request, end: int) -> np.ndarray:
        chain = self._chains.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        for position in range(len(chain), min(end, len(tokens))):
            images = tuple(
                (image.identifier, position - image.mm_position.offset)
                for image in request.mm_features
                if 0 <= position - image.mm_position.offset < image.mm_position.length
            )
            lora = request.lora_request.name if request.lora_request else None
            before = chain[-1] if chain else hash((request.cache_salt, lora))
            chain.append(hash((before, tokens[position], images)))
        # A request that ended or was preempted while a step was in flight: that token never came.
        # Drafts likewise: they are written, and written again when the tokens are known.
        return np.array(chain[:end] + [-1] * (end - len(chain)), dtype=np.int64)
