"""The native pool with moves, under Hypothesis: what a worker that follows it holds.

``test_pool_model.py`` predicts every answer of a pool that moves nothing. Where blocks move, which
ones do is policy; what must hold is that content follows: after each step, with the step's copies
made and its row updates followed, each row and each published prefix holds what was written to it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from one_group import admit_one, grow_one

from vllm_tagma._native import BlockRanges, Pool

BLOCKS = 12
PROMPTS = [
    [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(BLOCKS)] for name in "abcd"
]


class MovesMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(2, 30),
        compaction=st.sampled_from(["off", "idle", "live", "live"]),
        budget=st.sampled_from([1, 3, 8, 1_000]),
        slack=st.integers(0, 6),
    )
    def make(self, capacity: int, compaction: str, budget: int, slack: int) -> None:
        self.pool = Pool(
            capacity + 1,
            compaction=compaction,
            copy_budget=budget,
            slack=slack,
            record_evictions=True,
        )
        self.capacity, self.compaction, self.budget = capacity, compaction, budget
        self.memory: list[Any] = [None] * (capacity + 1)
        self.rows: dict[int, tuple[list[bytes], list[int]]] = {}  # what the worker knows
        self.new: dict[int, tuple[list[bytes], list[int]]] = {}  # of this step
        self.num_hits: dict[int, int] = {}  # of new rows
        self.hits: list[tuple[list[bytes], BlockRanges]] = []
        self.pool.begin_step()

    @rule(prompt=st.sampled_from(PROMPTS), more=st.integers(1, 5), chunk=st.booleans())
    def admit(self, prompt: list[bytes], more: int, chunk: bool) -> None:
        hit = self.pool.lookup(prompt, BLOCKS - 1)
        blocks = min(len(hit) + more, BLOCKS)
        ahead = BLOCKS if chunk else blocks
        idle = sum(self.pool.request_refs(b) == 0 for b in hit.ids())
        fits = blocks - len(hit) + idle <= self.pool.num_free
        given = admit_one(self.pool, hit, blocks, 0, 0, 0, ahead, BLOCKS, blocks, prompt)
        assert (given is not None) == fits
        if given is not None:
            handle, added = given
            row = self.pool.row_blocks(handle).ids()
            assert row[len(hit) :] == added.ids()
            assert self.pool.num_published(handle) == blocks
            self.new[handle] = (prompt, row)
            self.num_hits[handle] = len(hit)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(1, 3))
    def grow(self, data: st.DataObject, more: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        prompt = self.rows[handle][0]
        held = len(self.pool.row_blocks(handle))
        blocks = min(held + more, BLOCKS)
        fits = blocks - held <= self.pool.num_free
        given = grow_one(self.pool, handle, blocks, 0, 0, 0, 0, BLOCKS, blocks, prompt)
        assert (given is not None) == fits
        if given is not None:
            assert self.pool.row_blocks(handle).ids()[held:] == given.ids()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), first=st.integers(0, 6), count=st.integers(1, 6))
    def relocate(self, data: st.DataObject, first: int, count: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        before = self.pool.row_blocks(handle).ids()
        last = min(first + count, len(before))
        if first >= last:
            return
        moved = self.pool.relocate(handle, first, last)
        after = self.pool.row_blocks(handle).ids()
        assert after[:first] + after[last:] == before[:first] + before[last:]
        assert (after == before) == (not moved)
        assert not moved or self.compaction == "live"

    @precondition(lambda self: self.rows or self.new)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted([*self.rows, *self.new])))
        row = self.pool.row_blocks(handle).ids()
        known = self.num_hits[handle] if handle in self.new else len(self.rows[handle][1])
        if any(self.pool.request_refs(b) > 1 for b in row[known:]):
            return  # vLLM preempts before it admits whom the victim's blocks of this step could hit
        self.pool.free(handle)
        self.rows.pop(handle, None)
        self.new.pop(handle, None)

    @rule(prompt=st.sampled_from(PROMPTS))
    def keep_a_hit(self, prompt: list[bytes]) -> None:
        self.hits.append((prompt, self.pool.lookup(prompt, BLOCKS)))

    @precondition(lambda self: self.hits)
    @rule()
    def adopt_an_old_hit(self) -> None:
        """Its blocks may have moved: then it is refused by name, or they are cached for another."""
        prompt, hit = self.hits.pop(0)
        stale = [b for b in hit.ids() if not self.pool.is_cached(b)]
        if stale:
            with pytest.raises(ValueError, match="stale prefix hit"):
                admit_one(self.pool, hit, len(hit), 0, 0, 0, 0, BLOCKS, 0, prompt)

    @rule()
    def end_step(self) -> None:
        """The worker executes the step: copies, row updates, then what each row writes."""
        pool = self.pool
        pool.end_scheduling()
        copies = pool.take_copies()
        assert len(copies) <= self.budget
        assert len({to for _, to in copies}) == len(copies)
        content = [self.memory[source] for source, _ in copies]
        for (_, to), what in zip(copies, content, strict=True):
            self.memory[to] = what
        told = {handle: list(known) for handle, (_, known) in self.rows.items()}
        for handle, group, first_block, blocks in pool.take_row_updates():
            assert group == 0
            row = told.setdefault(handle, [])
            assert first_block <= len(row) <= first_block + len(blocks)
            row[first_block:] = blocks.ids()
        for handle, (prompt, known) in [*self.rows.items(), *self.new.items()]:
            row = pool.row_blocks(handle).ids()
            assert told[handle] == row  # the updates are all that a worker needs
            written = self.num_hits[handle] if handle in self.new else len(known)
            for position in range(written, len(row)):
                self.memory[row[position]] = prompt[position]
            self.rows[handle] = (prompt, row)
        self.new, self.num_hits = {}, {}
        for prompt, row in self.rows.values():
            assert [self.memory[b] for b in row] == prompt[: len(row)]
        for prompt in PROMPTS:
            hit = pool.lookup(prompt, BLOCKS).ids()
            assert [self.memory[b] for b in hit] == prompt[: len(hit)]
        assert pool.take_copies() == []
        assert pool.take_row_updates() == []
        pool.take_evicted()
        pool.take_relocations()
        pool.begin_step()

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        live = sum(self.pool.request_refs(b) > 0 for b in range(1, self.capacity + 1))
        idle = sum(
            self.pool.request_refs(b) == 0 and self.pool.is_cached(b)
            for b in range(1, self.capacity + 1)
        )
        for parts in (1, 3, 64):
            counted = self.pool.parts(parts)
            assert len(counted) == parts
            assert (sum(n for n, _ in counted), sum(n for _, n in counted)) == (live, idle)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.end_step()
        for handle in self.rows:
            self.pool.free(handle)
        given = admit_one(self.pool, BlockRanges(), self.capacity, 0, 0, 0, 0, 0, 0, [])
        assert given is not None
        assert given[1].ranges() == [(1, self.capacity)]
        self.pool.check_invariants()


TestMoves = MovesMachine.TestCase
TestMoves.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
