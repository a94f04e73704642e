"""Two drivers that move blocks before each step of an engine, far more than compaction ever does.

``BlockShuffle`` works under vLLM's own scheduler and manager and tests the workers alone. Before a
step the physical blocks of vLLM's pool change places by a random permutation: blocks of
running requests, shared ones, idle cached ones, free ones, in chains, swaps and longer cycles. That
is more than compaction ever does, and knows nothing of its policy. To vLLM's manager nothing
happens: its block objects keep their owners, hashes and places in the free queue, and only their
ids are exchanged. The workers must follow by copies and row updates; rows that did not move come
from vLLM's ids.

``CoreRelocation`` works under our scheduler and manager and asks the pool to move running requests'
blocks, which it records as compaction does.
"""

from __future__ import annotations

import random
from typing import Any

from vllm_tagma._native import BlockRanges
from vllm_tagma.integration.row_updates import row_updates_of, with_row_updates
from vllm_tagma.ranges import NULL_BLOCK
from vllm_tagma.row_update import RowUpdate


def _moved_ids(before: list[int], after: list[int]) -> bool:
    """Whether a block of a row is elsewhere; one that fell out of a window is not."""
    return any(new not in (old, NULL_BLOCK) for old, new in zip(before, after, strict=False))


class _Driver:
    """Wraps ``scheduler.schedule``; ``enabled`` turns the moves on.

    Every third step or so gets a token budget of a few tokens, whether enabled or not, so that
    requests run without being scheduled; ``stutters`` turns that off. Budgets depend on ``seed``
    and the number of steps alone.
    """

    def __init__(self, scheduler: Any, *, seed: int) -> None:
        self.enabled = False
        self.stutters = True
        self.steps = self.copies = self.cycles = self.rows = self.unscheduled = 0
        self._scheduler = scheduler
        self._seed = seed
        self._schedule = scheduler.schedule
        self._full_budget = scheduler.max_num_scheduled_tokens
        scheduler.schedule = self._move_and_schedule
        self.restart()

    def restart(self) -> None:
        """Begins the sequence of budgets and moves anew."""
        self._budgets = random.Random(self._seed)
        self._random = random.Random(self._seed + 1)

    def _move_and_schedule(self, *args: Any, **kwargs: Any) -> Any:
        budget = self._full_budget
        if self.stutters and self._budgets.random() < 0.35:
            budget = self._budgets.randint(1, 6)
        self._scheduler.max_num_scheduled_tokens = budget
        if not self.enabled:
            return self._schedule(*args, **kwargs)
        known = {r.request_id: self._rows(r.request_id) for r in self._scheduler.running}
        output = self._moved(*args, **kwargs)
        copies = dict(output.kv_cache_block_copies or [])
        names = [
            name
            for name, group, first, ranges in row_updates_of(output)
            if name in known and _moved_ids(known[name][group][first:], ranges.ids())
        ]
        self.steps += bool(copies)
        self.copies += len(copies)
        self.cycles += sum(source in copies.values() for source in copies)
        self.rows += len(names)
        self.unscheduled += sum(name not in output.num_scheduled_tokens for name in names)
        return output

    def _rows(self, request_id: str) -> list[list[int]]:
        """Per group the ids of a request's row, null blocks included."""
        ids = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        return [list(of_group) for of_group in ids]

    def _moved(self, *args: Any, **kwargs: Any) -> Any:
        """The output of a step before which blocks have moved."""
        raise NotImplementedError


class CoreRelocation(_Driver):
    """Relocates a random part of each running request where the pool can.

    Without a hole that holds it a part takes the place of cached blocks, ahead of their turn; then
    a request that was preempted finds less of its prefix when it comes back. ``spares_cached``
    leaves such parts where they are, so that hits and preemptions have to be those of blocks at
    rest.
    """

    spares_cached = False

    def _moved(self, *args: Any, **kwargs: Any) -> Any:
        manager = self._scheduler.kv_cache_manager
        begin = manager.new_step_starts

        def begin_and_move() -> None:
            begin()
            for request in self._scheduler.running:
                handle = manager._rows[request.request_id].handle
                for group, ids in enumerate(self._rows(request.request_id)):
                    nulls = sum(block == NULL_BLOCK for block in ids)  # the head of a window's row
                    if nulls == len(ids):
                        continue
                    first = self._random.randrange(nulls, len(ids))
                    last = self._random.randint(first + 1, len(ids))
                    longest = max((count for _, count in manager.pool.holes()), default=0)
                    if self.spares_cached and longest < last - first:
                        continue
                    manager.pool.relocate(handle, first, last, group)

        manager.new_step_starts = begin_and_move
        try:
            return self._schedule(*args, **kwargs)
        finally:
            manager.new_step_starts = begin


class BlockShuffle(_Driver):
    """Permutes the pool under vLLM's own manager."""

    blocks_per_step = 6

    def _moved(self, *args: Any, **kwargs: Any) -> Any:
        mapping = self._draw()
        self._exchange_ids(mapping)
        known = {r.request_id: self._rows(r.request_id) for r in self._scheduler.running}
        output = self._schedule(*args, **kwargs)
        assert not output.kv_cache_block_copies, "vLLM copies blocks itself in this step"
        output.kv_cache_block_copies = list(mapping.items()) or None
        whole = {request.req_id for request in output.scheduled_new_reqs}
        whole |= output.scheduled_cached_reqs.resumed_req_ids
        updates = []
        for name, rows in known.items():
            # With what the step appends; none if it was preempted.
            for group, (before, ids) in enumerate(zip(rows, self._rows(name), strict=True)):
                changed = [at for at, block in enumerate(before) if block in mapping.values()]
                if ids and changed:
                    first = 0 if name in whole else changed[0]
                    ranges = BlockRanges.from_ids(ids[first:])
                    updates.append(RowUpdate(name, group, first, ranges))
        return with_row_updates(output, updates)

    def _draw(self) -> dict[int, int]:
        """Old id -> new id: all blocks of one running request and some others change places."""
        running = self._scheduler.running
        pool = self._scheduler.kv_cache_manager.block_pool
        chosen: set[int] = set()
        if running:
            for ids in self._rows(self._random.choice(running).request_id):
                chosen.update(block for block in ids if block != NULL_BLOCK)
        others = [i for i in range(1, len(pool.blocks)) if i not in chosen]
        wanted = max(2, self.blocks_per_step - len(chosen))
        chosen.update(self._random.sample(others, min(wanted, len(others))))
        sources = sorted(chosen)
        destinations = self._random.sample(sources, len(sources))
        return {a: b for a, b in zip(sources, destinations, strict=True) if a != b}

    def _exchange_ids(self, mapping: dict[int, int]) -> None:
        pool = self._scheduler.kv_cache_manager.block_pool
        moved = {new: pool.blocks[old] for old, new in mapping.items()}
        for new, block in moved.items():
            block.block_id = new
            pool.blocks[new] = block
        # What vLLM keys by id.
        by_block = pool.cached_block_hashes_by_block
        pool.cached_block_hashes_by_block = {mapping.get(i, i): h for i, h in by_block.items()}
        cache = pool.cached_block_hash_to_block._cache
        for key, blocks in cache.items():
            if isinstance(blocks, dict):
                cache[key] = {block.block_id: block for block in blocks.values()}
