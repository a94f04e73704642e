"""The native pool, through its Python face, beside a naive model under Hypothesis.

The C++ tests compare the same core with a model of their own; this one shows that the bindings pass
every argument to its place and give back what the core said. Each answer is predicted: room or no
room, the blocks of a prefix hit, the evictions and their order, refusals under the range cap.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from one_group import admit_one, grow_one

from vllm_tagma._native import BlockRanges, Pool

PROMPT_BLOCKS = 14


def _prompt(*parts: tuple[str, int]) -> list[bytes]:
    """Block hashes of a prompt: chained, so that equal hashes mean equal prefixes."""
    names: list[str] = []
    for name, count in parts:
        names += [f"{name}{i}" for i in range(count)]
    hashes, chain = [], ""
    for name in names:
        chain += name
        # The eight bytes in front choose the slot of the index: here they all collide.
        hashes.append(b"collide!" + hashlib.sha256(chain.encode()).digest()[:8])
    return hashes


PROMPTS = [
    _prompt(("a", 14)),
    _prompt(("a", 5), ("b", 9)),
    _prompt(("a", 5), ("b", 4), ("c", 5)),
    _prompt(("d", 14)),
]


def _maximal(blocks: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive ids as (start, count), in the order given."""
    out: list[tuple[int, int]] = []
    for block in blocks:
        if out and sum(out[-1]) == block:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((block, 1))
    return out


def _fewest(stretches: list[tuple[int, int]], count: int, tail: int | None) -> int:
    """Fewest ranges that `count` more blocks add to a row that ends with `tail`."""
    left = count
    others = []
    for start, length in stretches:
        if tail is not None and start == tail + 1:
            left -= length
        else:
            others.append(length)
    ranges = 0
    for length in sorted(others, reverse=True):
        if left <= 0:
            break
        left -= length
        ranges += 1
    assert left <= 0
    return ranges


@dataclass
class Row:
    handle: int
    prompt: list[bytes]
    blocks: list[int]
    published: int
    published_before_step: int = 0
    published_step: int = -1


class PoolMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 20), cap=st.sampled_from([1, 2, 3, 4, 6, 256, 256, 256]))
    def make(self, capacity: int, cap: int) -> None:
        self.pool = Pool(capacity + 1, max_ranges=cap, record_evictions=True)
        self.capacity = capacity
        self.cap = cap
        self.refs = [0] * (capacity + 1)
        self.key_of: dict[int, bytes] = {}  # cached blocks
        self.blocks_of: dict[bytes, list[int]] = {}  # in order of publication
        self.lru: list[int] = []
        self.rows: list[Row] = []
        self.step = 0
        self.scheduling = False
        self.closed: list[int] = []

    # --- the model ----------------------------------------------------------------------------

    def _stretches(self, *, idle: bool) -> list[tuple[int, int]]:
        return _maximal(
            [
                b
                for b in range(1, self.capacity + 1)
                if self.refs[b] == 0 and (idle or b not in self.key_of)
            ]
        )

    def _num_free(self) -> int:
        return sum(1 for b in range(1, self.capacity + 1) if self.refs[b] == 0)

    def _fits(self, held: int, idle_hits: int, demand: tuple[int, ...]) -> bool:
        blocks, gate, watermark, reserved = demand[:4]
        free = self._num_free()
        if gate and max(gate - held, 0) + idle_hits + watermark > free:
            return False
        return max(blocks - held, 0) + idle_hits + watermark + reserved <= free

    def _acquire(self, blocks: list[int]) -> None:
        for b in blocks:
            if self.refs[b] == 0:
                self.lru.remove(b)
            self.refs[b] += 1

    def _release(self, blocks: list[int]) -> None:
        for b in reversed(blocks):
            self.refs[b] -= 1
            if self.refs[b] == 0 and b in self.key_of:
                self.lru.append(b)

    def _forget(self, block: int) -> None:
        key = self.key_of.pop(block)
        self.blocks_of[key].remove(block)
        if not self.blocks_of[key]:
            del self.blocks_of[key]
        if self.refs[block] == 0:
            self.lru.remove(block)

    def _expect_withdrawn(self, blocks: list[int]) -> None:
        assert self.pool.take_evicted() == [(b, 0, self.key_of[b]) for b in blocks]
        for b in blocks:
            self._forget(b)

    def _settle(self, row: list[int], wanted: int, added: BlockRanges | None) -> bool:
        """Follows what the pool did to bring `row` to `wanted` blocks; False if it refused."""
        lacking = wanted - len(row)
        if lacking <= 0:
            assert added is not None
            assert len(added) == 0
            assert self.pool.take_evicted() == []
            return True
        tail = row[-1] if row else None
        ranges = len(_maximal(row))
        fewest = _fewest(self._stretches(idle=True), lacking, tail)
        assert (added is not None) == (ranges + fewest <= self.cap)
        evicted = self.pool.take_evicted()
        in_holes = sum(length for _, length in self._stretches(idle=False))
        least = max(lacking - in_holes, 0)
        assert [b for b, *_ in evicted[:least]] == self.lru[:least]
        for i, (block, _, key) in enumerate(evicted):
            if i == least:
                assert added is not None
            assert key == self.key_of[block]
            assert self.refs[block] == 0
            if i < least:
                self._forget(block)
        by_recency = ranges + _fewest(self._stretches(idle=False), lacking, tail)
        capped = by_recency > max(self.cap // 2, ranges)
        assert capped or len(evicted) == least
        for block, *_ in evicted[least:]:
            self._forget(block)
        if added is None:
            return False
        ids = added.ids()
        assert len(ids) == lacking
        for b in ids:
            assert self.refs[b] == 0
            assert b not in self.key_of
            self.refs[b] = 1
        row += ids
        assert len(_maximal(row)) == (ranges + fewest if capped else by_recency)
        return True

    def _note_publication(self, row: Row, upto: int) -> None:
        if upto <= row.published:
            return
        if row.published_step != self.step:
            row.published_step = self.step
            row.published_before_step = row.published
        for i in range(row.published, upto):
            self.key_of[row.blocks[i]] = row.prompt[i]
            self.blocks_of.setdefault(row.prompt[i], []).append(row.blocks[i])
        row.published = upto

    def _lookup(self, prompt: list[bytes], max_blocks: int) -> BlockRanges:
        expected: list[int] = []
        for key in prompt[:max_blocks]:
            if key not in self.blocks_of:
                break
            longer = [*expected, self.blocks_of[key][0]]
            if len(_maximal(longer)) > (self.cap - 1) // 2:
                break
            expected = longer
        hit = self.pool.lookup(prompt, max_blocks)
        assert hit.ids() == expected
        assert hit.ranges() == _maximal(expected)
        return hit

    # --- the rules ----------------------------------------------------------------------------

    demands = st.tuples(
        st.integers(0, 5), st.sampled_from([0, 0, 1, 2]), st.sampled_from([0, 0, 0, 1, 4])
    )

    @rule(
        prompt=st.sampled_from(PROMPTS),
        hit_blocks=st.integers(0, PROMPT_BLOCKS),
        drop=st.sampled_from([0, 0, 1]),
        more=st.integers(0, 6),
        demand=demands,
        publish=st.integers(0, PROMPT_BLOCKS),
    )
    def admit(self, prompt, hit_blocks, drop, more, demand, publish) -> None:
        hit = self._lookup(prompt, hit_blocks)
        hit = hit.truncated(max(len(hit) - drop, 0))
        blocks = min(len(hit) + more, PROMPT_BLOCKS)
        publish = min(publish, blocks)
        gate, watermark, reserved = demand
        args = (blocks, gate and blocks + gate, watermark, reserved, blocks, blocks + 3)
        idle_hits = sum(1 for b in hit.ids() if self.refs[b] == 0)
        room = self._fits(len(hit), idle_hits, args)
        given = admit_one(self.pool, hit, *args, publish, prompt)
        if not room:
            assert given is None
            assert self.pool.take_evicted() == []
            return
        ids = hit.ids()
        self._acquire(ids)
        if not self._settle(ids, blocks, given[1] if given else None):
            self._release(hit.ids())
            return
        assert given is not None
        row = Row(given[0], prompt, ids, len(hit))
        self.rows.append(row)
        self._note_publication(row, publish)

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(),
        more=st.integers(-2, 4),
        demand=demands,
        publish=st.integers(0, PROMPT_BLOCKS),
    )
    def grow(self, data, more, demand, publish) -> None:
        row = data.draw(st.sampled_from(self.rows))
        blocks = max(len(row.blocks) + more, 0)
        publish = min(publish, max(blocks, len(row.blocks)))
        gate, watermark, reserved = demand
        args = (blocks, gate and blocks + gate, watermark, reserved, blocks, blocks + 3)
        room = self._fits(len(row.blocks), 0, args)
        given = grow_one(self.pool, row.handle, *args, publish, row.prompt)
        if not room:
            assert given is None
            assert self.pool.take_evicted() == []
        elif self._settle(row.blocks, blocks, given):
            self._note_publication(row, min(publish, len(row.prompt)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), upto=st.integers(0, PROMPT_BLOCKS))
    def publish(self, data, upto) -> None:
        row = data.draw(st.sampled_from(self.rows))
        upto = min(upto, len(row.blocks))
        self.pool.publish(row.handle, upto, row.prompt)
        self._note_publication(row, upto)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        self.pool.free(row.handle)
        self.closed.append(row.handle)
        withdrawn = []
        if self.scheduling and row.published_step == self.step:
            fresh = row.blocks[row.published_before_step : row.published]
            withdrawn = [b for b in fresh if b in self.key_of]
        self._expect_withdrawn(withdrawn)
        self._release(row.blocks)

    @rule(prompt=st.sampled_from(PROMPTS), max_blocks=st.integers(-1, PROMPT_BLOCKS + 3))
    def lookup(self, prompt, max_blocks) -> None:
        self._lookup(prompt, max(max_blocks, 0))

    @rule(data=st.data())
    def evict(self, data) -> None:
        blocks = data.draw(st.lists(st.integers(1, self.capacity), max_size=3))
        self.pool.evict(blocks)
        unique = dict.fromkeys(blocks)
        self._expect_withdrawn([b for b in unique if b in self.key_of])

    @rule()
    def reset(self) -> None:
        done = self.pool.reset()
        assert done == (self._num_free() == self.capacity)
        if done:
            self.key_of.clear()
            self.blocks_of.clear()
            self.lru.clear()

    @rule(begin=st.booleans())
    def step_or_decide(self, begin) -> None:
        if begin:
            self.pool.begin_step()
            self.step += 1
        else:
            self.pool.end_scheduling()
        self.scheduling = begin

    # --- what must hold after every rule ------------------------------------------------------

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()

    @invariant()
    def everything_countable_agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, stats = self.pool, self.pool.stats()
        free = self._num_free()
        holes = self._stretches(idle=False)
        assert pool.holes() == holes
        assert pool.num_free == stats["free_blocks"] == free
        assert pool.capacity == stats["capacity_blocks"] == self.capacity
        assert pool.num_blocks == self.capacity + 1
        assert stats["live_blocks"] == self.capacity - free
        assert stats["idle_blocks"] == len(self.lru)
        assert stats["cached_blocks"] == len(self.key_of)
        assert stats["hole_blocks"] == sum(length for _, length in holes)
        assert stats["holes"] == len(holes)
        assert stats["largest_hole_blocks"] == max((length for _, length in holes), default=0)
        assert stats["rows"] == len(self.rows)
        for b in range(1, self.capacity + 1):
            assert pool.request_refs(b) == self.refs[b]
            assert pool.is_cached(b) == (b in self.key_of)
        for row in self.rows:
            assert pool.row_blocks(row.handle).ids() == row.blocks
            assert pool.num_published(row.handle) == row.published

    def teardown(self) -> None:
        """The drain: everything freed, then the whole pool as one range, evicting in LRU order."""
        if not hasattr(self, "pool"):
            return
        self.pool.end_scheduling()
        for row in self.rows:
            self.pool.free(row.handle)
            self._release(row.blocks)
        self.pool.take_evicted()
        given = admit_one(self.pool, BlockRanges(), self.capacity, 0, 0, 0, 0, 0, 0, [])
        assert given is not None
        assert given[1].ranges() == [(1, self.capacity)]
        assert sorted(b for b, *_ in self.pool.take_evicted()) == sorted(self.lru)
        assert self.pool.num_free == 0
        self.pool.check_invariants()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
