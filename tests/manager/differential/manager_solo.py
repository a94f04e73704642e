"""Our manager alone, with ``Pair``'s face, held to its contract call by call.

With slack or a short copy budget the backend may evict other blocks than stock does, so there is no
stock manager to compare with. What must hold in every mode is checked instead: ``allocate_slots``
refuses exactly when vLLM's rule says that too few blocks are free; a hit is the longest resident
prefix, told by the events; a row has the blocks that were asked for; blocks have one owner or are a
published prefix of all; the laws hold.
"""

from __future__ import annotations

import collections
from typing import Any

from kv_requests import ResidentSet, event_keys, ids_of, make_manager, mode_of, mode_options
from kv_worker import StepLog
from manager_pair import Hit, RecordingCollector
from vllm.v1.request import Request, RequestStatus

from vllm_tagma.row_update import RowUpdate

MAX_HIT_RANGES = 127


class Solo:
    """Methods mirror the manager's; see ``Pair``. ``mode`` is one of ``mode_of``."""

    windows = (None,)  # one full-attention group

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        events: bool = True,
        metrics: bool = True,
        mode: str = "default",
        **options: Any,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.caching = enable_caching
        self.eagle = bool(options.get("use_eagle"))
        self.tagma = make_manager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            enable_caching=enable_caching,
            enable_kv_cache_events=True,
            metrics_collector=RecordingCollector(caching=enable_caching, strict=True)
            if metrics
            else None,
            log_stats=True,
            **mode_options(mode),
            **options,
        )
        self.budget = mode_of(mode)[0].copy_budget
        self.resident = ResidentSet()
        self.reported_twice = False
        self.live: dict[str, Request] = {}
        self.published: dict[str, int] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self.tally: collections.Counter[str] = collections.Counter()
        self.log = StepLog()
        self.copies: list[tuple[int, int]] = []
        self.updates: list[RowUpdate] = []

    # --- calls of the scheduler -------------------------------------------------------------------

    def new_step_starts(self) -> None:
        self.log.begin()
        self.admitted: set[str] = set()
        self.tagma.new_step_starts()

    def get_computed_blocks(self, request: Request) -> Hit:
        self.calls["get_computed_blocks"] += 1
        free = self.num_free()
        hit, tokens, boundary = self.tagma.get_computed_blocks(request)
        assert boundary == 0
        assert len(ids_of(hit)) * self.block_size == tokens
        assert self.num_free() == free
        if request.kv_cache_report_mode == "full" and tokens:
            self.reported_twice = True
        self._take_events()
        if self.caching and not request.skip_reading_prefix_cache and not self.reported_twice:
            usable = (request.num_tokens - 1) // self.block_size
            keys = event_keys(request)[:usable]
            resident = next(
                (i for i, key in enumerate(keys) if not self.resident.count[key]), len(keys)
            )
            expected = max(resident - self.eagle, 0)
            ranges = hit.num_ranges[0] if tokens else 0
            assert tokens // self.block_size == expected or ranges >= MAX_HIT_RANGES - self.eagle
        self.tally["hit"] += bool(tokens)
        return Hit(None, hit, tokens)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Hit | None = None,
        *,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> int | None:
        """Number of new blocks, or None."""
        self.calls["allocate_slots"] += 1
        name = request.request_id
        held = len(ids_of(self.tagma.get_blocks(name)))
        hit_ids = ids_of(hit.tagma) if hit else []
        held += len(hit_ids)
        idle = sum(self.tagma.pool.request_refs(block) == 0 for block in hit_ids)
        hit_tokens = hit.num_tokens if hit else 0
        computed = min(request.num_computed_tokens + hit_tokens, self.max_model_len)
        wanted = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        lacking = max(-(-wanted // self.block_size) - held, 0)
        free = self.num_free()
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        kept = self.tagma.watermark_blocks if has_scheduled_reqs and waits else 0
        fits = lacking + idle + kept <= free - reserved_blocks
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            fits = fits and max(-(-whole // self.block_size) - held, 0) + idle + kept <= free
        new = self.tagma.allocate_slots(
            request,
            num_new_tokens,
            hit_tokens,
            hit.tagma if hit else None,
            num_lookahead_tokens=num_lookahead_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
            has_scheduled_reqs=has_scheduled_reqs,
        )
        assert (new is not None) == fits, f"{lacking=} {idle=} {kept=} {free=} gave {new}"
        if new is None:
            self.tally["refused"] += 1
            assert self.num_free() == free
            return None
        added = ids_of(new)
        assert len(added) == lacking
        assert self.num_free() == free - lacking - idle
        row = ids_of(self.tagma.get_blocks(name))
        assert len(row) == held + lacking
        assert row[held:] == added
        if waits:
            self.admitted.add(name)
        self.live[name] = request
        self._note_publication(request, min(computed + num_new_tokens, request.num_tokens))
        self.log.given(request, new, self.tagma)
        return len(added)

    def no_hit(self) -> Hit:
        return Hit(None, self.tagma.empty_kv_cache_blocks, 0)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        self.calls["cache_blocks"] += 1
        self.tagma.cache_blocks(request, num_computed_tokens)
        if request.request_id in self.live:
            self._note_publication(request, num_computed_tokens)

    def free(self, request: Request) -> None:
        self.calls["free"] += 1
        self.tagma.free(request)
        self.live.pop(request.request_id, None)
        self.published.pop(request.request_id, None)
        self.log.freed(request)

    def preempt(self, request: Request) -> None:
        self.calls["preempt"] += 1
        self.free(request)

    def row_of(self, name: str) -> Hit:
        return Hit(None, self.tagma.get_blocks(name), 0)

    def evict_blocks(self, blocks: Hit, chosen: list[int]) -> None:
        self.calls["evict_blocks"] += 1
        ids = ids_of(blocks.tagma)
        self.tagma.evict_blocks({ids[i] for i in chosen})

    def reset_prefix_cache(self) -> bool:
        self.calls["reset_prefix_cache"] += 1
        done = self.tagma.reset_prefix_cache()
        assert done == (not self.live)
        return done

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        self.tagma.record_prefix_cache_stats(request, num_hits)

    def end_scheduling(self, scheduled: list[Request]) -> None:
        assert self.tagma.take_new_block_ids() == []
        # Before the copies here, behind them in ``Pair``: neither depends on the other.
        self.updates = self.tagma.take_row_updates(self.log.whole)
        assert self.tagma.take_row_updates(()) == []
        self.copies, kept = self.tagma.take_kv_cache_block_copies()
        assert kept == []
        assert len(self.copies) <= max(self.budget, 0)
        assert {update.request_id for update in self.updates} <= self.live.keys()
        self.tally["copies"] += len(self.copies)

    def estimate_cached_tokens(self, request: Request) -> int:
        return self.tagma.estimate_cached_tokens(request)

    # --- checks -----------------------------------------------------------------------------------

    def num_free(self) -> int:
        return self.tagma.block_pool.get_num_free_blocks()

    def end_step(self) -> None:
        self.tally["steps"] += 1
        self._take_events()
        stats = self.tagma.pool.stats()
        if not self.reported_twice:
            assert self.resident.count.total() == stats["cached_blocks"]
        assert stats["cap_refusals"] == 0
        assert stats["live_blocks"] + self.num_free() == self.num_blocks - 1
        self._check_rows()
        self.tagma.check_invariants()

    def _take_events(self) -> None:
        events = self.tagma.take_events()
        if not self.reported_twice:
            self.resident.replay(events)

    def _check_rows(self) -> None:
        owners: dict[int, tuple[int, bytes | None]] = {}
        counts: collections.Counter[int] = collections.Counter()
        for name, request in self.live.items():
            (row,) = self.tagma.get_block_ids(name)
            counts.update(row)
            assert len(set(row)) == len(row)
            for position, block in enumerate(row):
                assert 0 < block < self.num_blocks
                shared = position < self.published.get(name, 0)
                content = request.block_hashes[position] if shared else None
                if block in owners:
                    assert content is not None, f"block {block} has two owners"
                    assert owners[block] == (position, content)
                owners[block] = (position, content)
        for block, count in counts.items():
            assert self.tagma.pool.request_refs(block) == count

    def _note_publication(self, request: Request, tokens: int) -> None:
        if self.caching:
            name = request.request_id
            blocks = min(tokens // self.block_size, len(request.block_hashes))
            self.published[name] = max(self.published.get(name, 0), blocks)
