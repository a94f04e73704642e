"""vLLM's own manager and ours behind one face, compared after every call.

Both read the same ``Request`` objects: neither writes to them (the pair would notice, since the
request decides what each does next).

Two things are evened out so that equality can go on for ever; both are exact, neither loosens a
comparison:

* *Preemption in the step of publication* (vLLM #57580). Ours withdraws what the request published
  in this very step; stock leaves it hittable though it was never written. Before stock frees the
  request, :meth:`Pair.preempt` withdraws from it exactly the blocks that the pair saw published in
  this step. They are still referenced then, so stock puts them to the front of its queue, as ours
  makes holes.
* *Withdrawing idle blocks* (``evict_blocks``). Stock leaves a withdrawn idle block at its place in
  the LRU order, so a block without content outlives cached ones; ours makes it a hole at once. The
  pair moves it to the front of stock's queue, where stock puts every other block without a hash.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from kv_requests import ResidentSet, make_manager, mode_options, nulls_of, real_ids_of
from kv_worker import StepLog
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.request import Request

from vllm_tagma.row_update import RowUpdate


class RecordingCollector:
    """Counts what a manager tells vLLM's metrics collector, and checks each block's life.

    Without a prefix cache no manager reports evictions, so lives are not checked there. Evictions
    are not counted: stock reports a block when it is handed out again, ours also when it leaves the
    cache. ``strict``: an accessed block must be alive. Not so in stock, where ``evict_blocks`` ends
    the life of a referenced block that may be published later.
    """

    def __init__(self, *, caching: bool, strict: bool) -> None:
        self.caching = caching
        self.strict = strict
        self.calls: collections.Counter[str] = collections.Counter()
        self.block_metrics: dict[int, bool] = {}  # of vLLM's collector: blocks alive

    def on_block_allocated(self, block: Any) -> None:
        alive = block.block_id in self.block_metrics
        assert not (self.caching and alive), f"{block}: allocated twice"
        self.block_metrics[block.block_id] = True
        self.calls["allocated"] += 1

    def on_block_accessed(self, block: Any) -> None:
        alive = block.block_id in self.block_metrics
        assert alive or not self.strict, f"{block}: accessed, not alive"
        self.calls["accessed"] += 1

    def on_block_evicted(self, block: Any) -> None:
        self.block_metrics.pop(block.block_id, None)

    def reset(self) -> None:
        self.block_metrics.clear()
        self.calls["reset"] += 1


class Hit:
    """A look-up's result on both sides."""

    def __init__(self, stock: Any, tagma: Any, num_tokens: int, boundary: int = 0) -> None:
        self.boundary = boundary
        self.stock = stock
        self.tagma = tagma
        self.num_tokens = num_tokens


class Pair:
    """Stock manager, our manager, and the comparisons. Methods mirror the manager's."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        events: bool = True,
        metrics: bool = True,
        mode: str = "exact",
        windows: Sequence[int | None] = (None,),
        **options: Any,
    ) -> None:
        self.windows = windows
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.caching = enable_caching
        self.collectors = [
            RecordingCollector(caching=enable_caching, strict=strict) if metrics else None
            for strict in (False, True)
        ]
        self.stock, self.tagma = (
            make_manager(
                *kind,
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                enable_caching=enable_caching,
                enable_kv_cache_events=events,
                metrics_collector=collector,
                log_stats=True,
                windows=windows,
                **options,
                **ours,
            )
            for kind, collector, ours in zip(
                [(KVCacheManager,), ()], self.collectors, [{}, mode_options(mode)], strict=True
            )
        )
        self.log = StepLog()
        self.copies: list[tuple[int, int]] = []
        self.updates: list[RowUpdate] = []
        self.events = events
        self.resident = ResidentSet()
        self.reported_twice = False  # "full" reports repeat what is resident: replay would not hold
        self.live: dict[str, Request] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.tally: collections.Counter[str] = collections.Counter()  # what happened in the calls
        # Blocks published before the current step, for requests that published in it.
        self._before_step: dict[str, list[int]] = {}  # by group

    # --- calls of the scheduler -------------------------------------------------------------------

    def new_step_starts(self) -> None:
        self._before_step.clear()
        self.log.begin()
        self.stock.new_step_starts()
        self.tagma.new_step_starts()

    def get_computed_blocks(self, request: Request) -> Hit:
        self.calls["get_computed_blocks"] += 1
        free = self.num_free()
        stock, stock_tokens, stock_boundary = self.stock.get_computed_blocks(request)
        tagma, tokens, boundary = self.tagma.get_computed_blocks(request)
        assert (tokens, boundary) == (stock_tokens, stock_boundary)
        assert nulls_of(tagma) == nulls_of(stock)
        assert all(len(ids) == tokens // self.block_size for ids in tagma.get_block_ids())
        assert self.num_free() == free, "a look-up changed the free count"
        self.tally["hit"] += bool(tokens)
        self.tally["boundary"] += bool(boundary)
        if tokens and self.events and request.kv_cache_report_mode == "full":
            self.reported_twice = True
        return Hit(stock, tagma, tokens, boundary)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: Hit | None = None, **options: Any
    ) -> int | None:
        """Number of new blocks, or None."""
        self.calls["allocate_slots"] += 1
        name = request.request_id
        published = self._stock_published(name)
        rows = self.tagma.get_block_ids(name)
        computed = {"num_new_computed_tokens": hit.num_tokens} if hit else {}
        stock = self.stock.allocate_slots(
            request,
            num_new_tokens,
            new_computed_blocks=hit.stock if hit else None,
            **computed,
            **options,
        )
        tagma = self.tagma.allocate_slots(
            request,
            num_new_tokens,
            new_computed_blocks=hit.tagma if hit else None,
            **computed,
            **options,
        )
        assert (tagma is None) == (stock is None), f"stock gave {stock}, ours {tagma}"
        self._compare(request)
        if tagma is None:
            self.tally["refused"] += 1
            return None
        assert nulls_of(tagma) == nulls_of(stock)
        none_if_empty = tagma.get_block_ids(allow_none=True)
        assert (none_if_empty is None) == (stock.get_block_ids(allow_none=True) is None)
        self.live[name] = request
        self.log.given(request, tagma, self.tagma)
        after = self.tagma.get_block_ids(name)
        self.tally["skipped"] += sum(
            new == 0 != old
            for row, now in zip(rows, after, strict=True)
            for old, new in zip(row, now, strict=False)
        )
        adopted = hit.num_tokens // self.block_size if hit else 0
        self._note_publication(name, [max(before, adopted) for before in published])
        return len(real_ids_of(tagma))

    def no_hit(self) -> Hit:
        """What the scheduler passes for a waiting request that holds blocks already."""
        return Hit(self.stock.empty_kv_cache_blocks, self.tagma.empty_kv_cache_blocks, 0)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        self.calls["cache_blocks"] += 1
        published = self._stock_published(request.request_id)
        self.stock.cache_blocks(request, num_computed_tokens)
        self.tagma.cache_blocks(request, num_computed_tokens)
        self._note_publication(request.request_id, published)
        self._compare(request)

    def free(self, request: Request) -> None:
        """A request ended or was aborted, outside of scheduling."""
        self.calls["free"] += 1
        self.stock.free(request)
        self.tagma.free(request)
        self.live.pop(request.request_id, None)
        self.log.freed(request)
        self._before_step.pop(request.request_id, None)
        self._compare(request)

    def preempt(self, request: Request) -> None:
        """A request is freed while the step is being scheduled."""
        self.calls["preempt"] += 1
        name = request.request_id
        before = self._before_step.get(name)
        if before is not None:
            now = self._stock_published(name)
            for group, row in enumerate(self.stock.get_blocks(name).blocks):
                for block in row[before[group] : now[group]]:
                    if block.block_hash is not None:
                        self.tally["withdrawn"] += 1
                        self.stock.evict_blocks({block.block_id})
        self.free(request)

    def row_of(self, name: str) -> Hit:
        return Hit(self.stock.get_blocks(name), self.tagma.get_blocks(name), 0)

    def evict_blocks(self, blocks: Hit, chosen: list[int]) -> None:
        """Withdraws the chosen ones of these blocks, by index among those that are not null."""
        self.calls["evict_blocks"] += 1
        stock_ids, tagma_ids = (
            [real_ids_of(side)[i] for i in chosen] for side in (blocks.stock, blocks.tagma)
        )
        queue = self.stock.block_pool.free_block_queue
        for (
            block_id
        ) in stock_ids:  # one by one: a set has no order, and events are compared in order
            self.stock.evict_blocks({block_id})
            block = self.stock.block_pool.blocks[block_id]
            if block.ref_cnt == 0:
                queue.remove(block)
                queue.prepend_n([block])
        for block_id in tagma_ids:
            self.tagma.evict_blocks({block_id})
        self._compare(None)

    def reset_prefix_cache(self) -> bool:
        self.calls["reset_prefix_cache"] += 1
        done = self.tagma.reset_prefix_cache()
        assert done == self.stock.reset_prefix_cache()
        assert done == (not self.live)
        self._compare(None)
        return done

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        self.stock.record_prefix_cache_stats(request, num_hits)
        self.tagma.record_prefix_cache_stats(request, num_hits)

    def end_scheduling(self, scheduled: list[Request]) -> None:
        """What ``schedule()`` reads once its decisions are made."""
        for request in scheduled:
            first, second = (self.tagma.get_block_ids(request.request_id) for _ in range(2))
            for row, again in zip(first, second, strict=True):
                assert row == again
                assert row is not again, "shared list"
        for take in ("take_new_block_ids", "take_boundary_state_offloads"):
            assert getattr(self.tagma, take)() == getattr(self.stock, take)()
        assert self.stock.take_kv_cache_block_copies() == ([], [])
        self.copies, kept = self.tagma.take_kv_cache_block_copies()
        assert kept == []
        self.updates = self.tagma.take_row_updates(self.log.whole)
        self.tally["copies"] += len(self.copies)

    def estimate_cached_tokens(self, request: Request) -> int:
        tokens = self.tagma.estimate_cached_tokens(request)
        assert tokens == self.stock.estimate_cached_tokens(request)
        return tokens

    # --- comparisons ------------------------------------------------------------------------------

    def num_free(self) -> int:
        free = self.tagma.block_pool.get_num_free_blocks()
        assert free == self.stock.block_pool.get_num_free_blocks()
        return free

    def end_step(self) -> None:
        """Compares everything that can be: events, statistics, residents, rows, laws."""
        self.tally["steps"] += 1
        stock_events, events = self.stock.take_events(), self.tagma.take_events()
        assert events == stock_events
        assert self.tagma.make_prefix_cache_stats() == self.stock.make_prefix_cache_stats()
        blocks = self.stock.block_pool.blocks
        resident = collections.Counter(
            maybe_convert_block_hash(get_block_hash(block.block_hash))
            for block in blocks
            if block.block_hash is not None
        )
        stats = self.tagma.pool.stats()
        assert stats["cached_blocks"] == resident.total()
        if self.events and not self.reported_twice:
            self.resident.replay(events)
            assert self.resident.count == resident, "the event stream is not the resident set"
        # With the cap in play ours may refuse or evict more; these traces stay below it.
        assert (stats["cap_evictions"], stats["cap_refusals"]) == (0, 0)
        self._check_rows()
        self.tagma.check_invariants()

    def _compare(self, request: Request | None) -> None:
        self.num_free()
        assert self.tagma.usage == self.stock.usage
        if request is not None:
            rows, stock_rows = (
                nulls_of(manager.get_blocks(request.request_id))
                for manager in (self.tagma, self.stock)
            )
            assert rows == stock_rows
            self.estimate_cached_tokens(request)
        stock, tagma = self.collectors
        if stock is not None:
            assert tagma.calls == stock.calls

    def _check_rows(self) -> None:
        """Ids valid; a block has one owner, or is the same published prefix block of several."""
        owners: dict[int, tuple[int, int, bytes | None]] = {}
        counts: collections.Counter[int] = collections.Counter()
        for name, request in self.live.items():
            rows = self.tagma.get_block_ids(name)
            clipped, stock_clipped = (
                manager.get_block_ids_for_computed_tokens(name, request.num_computed_tokens)
                for manager in (self.tagma, self.stock)
            )
            assert [len(ids) for ids in clipped] == [len(ids) for ids in stock_clipped]
            for group, (row, published) in enumerate(
                zip(rows, self._stock_published(name), strict=True)
            ):
                held = [block_id for block_id in row if block_id]
                assert len(set(held)) == len(held)
                counts.update(held)
                for position, block_id in enumerate(row):
                    if not block_id and self.windows[group] is not None:
                        continue
                    assert 0 < block_id < self.num_blocks
                    content = request.block_hashes[position] if position < published else None
                    owner = (group, position, content)
                    if block_id in owners:
                        assert content is not None, f"block {block_id} has two owners"
                        assert owners[block_id] == owner
                    owners[block_id] = owner
        for block_id, count in counts.items():
            assert self.tagma.pool.request_refs(block_id) == count

    def _stock_published(self, name: str) -> list[int]:
        managers = self.stock.coordinator.single_type_managers
        return [manager.num_cached_block.get(name, 0) for manager in managers]

    def _note_publication(self, name: str, before: list[int]) -> None:
        """Of a window's hit the head may be skipped: what lies there was published by others."""
        if any(now > then for now, then in zip(self._stock_published(name), before, strict=True)):
            self._before_step.setdefault(name, before)
