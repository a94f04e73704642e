"""vLLM's KV-cache manager contract over the native pool: look up, allocate, grow, free.

Read this first. The scheduler calls ``get_computed_blocks`` for each waiting request, on every
retry; ``allocate_slots`` for each request it schedules; ``free`` when one ends or is preempted.
Each is at most one native call, and nothing per block is created but the id lists that vLLM wants.

The class does not derive from vLLM's: a method that vLLM adds later would be inherited and act on
state that is not there. Unknown constructor arguments are refused, and unknown attributes are an
``AttributeError``; no ``__getattr__`` words it better, since with one each attribute that is there
costs more to read, several in every call of a decode step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from vllm_tagma import support
from vllm_tagma.blocks import NO_RANGES, TagmaKVCacheBlocks
from vllm_tagma.config import TagmaConfig
from vllm_tagma.core_pool import new_pool
from vllm_tagma.events import EventLog
from vllm_tagma.group_rows import Demand, GroupRows
from vllm_tagma.manager_laws import require_manager_laws
from vllm_tagma.observers import Observers
from vllm_tagma.request_row import RequestRow
from vllm_tagma.served_arguments import require_served
from vllm_tagma.stand_ins import BlockPool, Coordinator, Group
from vllm_tagma.transfer_contract import TransferContract

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from vllm_tagma._native import BlockRanges


# Under vLLM's logger: its handlers and level apply, a logger of our own would stay silent.
_logger = logging.getLogger("vllm.tagma.manager")

_RUNNING = RequestStatus.RUNNING
_ADMISSION = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class TagmaKVCacheManager(TransferContract):
    """Range-addressed KV-cache manager: one full-attention group, or several groups and windows,
    whose part of each call is in ``group_rows.py``.

    Constructor arguments are vLLM's own (``vllm/v1/core/kv_cache_manager.py``), all by keyword but
    the first, plus ``tagma_config``. Raises :class:`UnsupportedError` for an argument that vLLM
    added since, and for values outside the support matrix. Not thread-safe, as vLLM's is not.
    """

    # The members below are part of vLLM's contract and constant here.
    mamba_shared_prefix_checkpoint = False

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        tagma_config: TagmaConfig | None = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        groups = require_served(
            kv_cache_config,
            unknown,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size if enable_caching else None,
            num_prefill_lookahead=num_prefill_lookahead,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            enable_mamba_shared_prefix_checkpoint=enable_mamba_shared_prefix_checkpoint,
            alignment=tagma_config.alignment if tagma_config else 1,
            use_eagle=use_eagle,
            max_in_flight_tokens=max_in_flight_tokens or max_model_len,
            max_model_len=max_model_len,
        )
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.block_size = groups.block_size
        self.num_kv_cache_groups = len(groups.groups)
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.enable_kv_cache_events = enable_kv_cache_events
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None

        self.pool = new_pool(
            kv_cache_config.num_blocks,
            tagma_config or TagmaConfig(),
            record_evictions=enable_kv_cache_events or metrics_collector is not None,
            groups=[group.pool_group for group in groups.groups],
        )
        self._rows: dict[str, RequestRow] = {}
        self._request_of: dict[int, str] = {}  # row handle -> request id
        self._observers = Observers(
            self.pool,
            # That hashes cover tokens behind their blocks shows in the events alone; a block whose
            # hash is not known yet is published once it is.
            events=EventLog.of_groups(
                (group.spec for group in groups.groups), lookahead_tokens=num_hash_lookahead_tokens
            )
            if enable_kv_cache_events
            else None,
            collector=metrics_collector,
            enable_caching=enable_caching,
        )
        self._check_each_step = tagma_config is not None and tagma_config.check_invariants

        self._group_rows = None if groups.plain else GroupRows(self.pool, groups, self._observers)
        self.coordinator = Coordinator(
            tuple(Group(group.spec.block_size, group.spec) for group in groups.groups),
            self._num_held,
        )
        self.block_pool = BlockPool(self.pool, self._give_back)
        self.empty_kv_cache_blocks = TagmaKVCacheBlocks((NO_RANGES,) * len(groups.groups))

    # --- steps ------------------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        """First call of ``schedule()``: from here to :meth:`take_new_block_ids` a freed request was
        preempted, and what it published in this step will never be written."""
        self.pool.begin_step()
        if self._check_each_step:
            self.check_invariants()

    def take_new_block_ids(self) -> list[int]:
        """Blocks that the worker must zero: none, for full attention. Ends the scheduling phase:
        vLLM calls it once a step, after all decisions."""
        self.pool.end_scheduling()
        return []

    # --- look up ----------------------------------------------------------------------------------

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[TagmaKVCacheBlocks, int, int]:
        """The longest cached prefix of a request.

        Returns (blocks, tokens, boundary); tokens is a multiple of the block size and leaves at
        least one token to compute. ``boundary``: where a longer prefix ends that some group has
        and a window has not kept, or 0; vLLM notes it on the request, whose blocks there are then
        cached. No side effect: the scheduler drops the result when it does not admit the request.
        O(blocks hit), with windows O(blocks).
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        if max_cache_hit_length is None:
            max_cache_hit_length = request.num_tokens - 1
        if self._group_rows is not None:
            return self._common_hit(self._group_rows, request, max_cache_hit_length)
        hit = self.pool.lookup(request.block_hashes, max_cache_hit_length // self.block_size)
        num_blocks = len(hit)
        if num_blocks and self.use_eagle:
            # The draft head needs the hidden states of the last block, so it is recomputed.
            num_blocks -= 1
            hit = hit.truncated(num_blocks)
        if not num_blocks:
            return self.empty_kv_cache_blocks, 0, 0
        if getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self._observers.stored(request, 0, num_blocks)
        return TagmaKVCacheBlocks((hit,)), num_blocks * self.block_size, 0

    def _common_hit(
        self, group_rows: GroupRows, request: Request, max_tokens: int
    ) -> tuple[TagmaKVCacheBlocks, int, int]:
        hits, num_blocks, longest = group_rows.lookup(
            request.block_hashes, max_tokens // self.block_size
        )
        boundary = longest * self.block_size if longest > num_blocks else 0
        if not num_blocks:
            return self.empty_kv_cache_blocks, 0, boundary
        if getattr(request, "kv_cache_report_mode", "incremental") == "full":
            for group in range(self.num_kv_cache_groups):
                self._observers.stored(request, 0, num_blocks, group)
        return TagmaKVCacheBlocks(hits), num_blocks * self.block_size, boundary

    # --- allocate and grow ------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: TagmaKVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> TagmaKVCacheBlocks | None:
        """Gives a request slots for its next tokens and publishes the blocks that they fill.

        Arguments are vLLM's. Returns the new blocks (hits not included), or None if too few blocks
        are free; a lack of long holes is never a reason, except beyond the cap of 256 ranges, where
        preemption makes room. With ``delay_cache_blocks`` the row will be received: it is pinned
        (``transfer_contract.py``) and nothing of it published. Raises :class:`UnsupportedError` for
        what only encoder-decoder models use. O(1) while the tokens fit the last block. No blocks
        are zeroed, so ``skip_zeroing_group_ids`` does not matter.
        """
        # A decode step calls this once a request: it is short, since a frame costs what it has in
        # variables, used or not.
        row = self._rows.get(request.request_id)
        if (
            row is not None
            and request.status is _RUNNING
            and num_new_tokens
            and not (
                num_new_computed_tokens
                or new_computed_blocks
                or full_sequence_must_fit
                or reserved_blocks
                or num_external_computed_tokens
                or delay_cache_blocks
                or num_encoder_tokens
            )
        ):
            computed = request.num_computed_tokens
            if num_new_tokens == 1 and not num_lookahead_tokens:
                quiet = computed < row.quiet_tokens
            else:
                quiet = computed + num_new_tokens + num_lookahead_tokens <= row.quiet_tokens
            if quiet:
                return self.empty_kv_cache_blocks  # inside the last block: nothing to do
            if self._group_rows is None:
                return self._run_on(request, row, computed, num_new_tokens, num_lookahead_tokens)
        return self._allocate(
            request,
            row,
            num_new_tokens,
            num_new_computed_tokens + num_external_computed_tokens,
            (new_computed_blocks or self.empty_kv_cache_blocks).blocks,
            num_lookahead_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
            has_scheduled_reqs,
        )

    def _run_on(
        self, request: Request, row: RequestRow, computed: int, new: int, lookahead: int
    ) -> TagmaKVCacheBlocks | None:
        """:meth:`allocate_slots` for a running request in the one group, twice a block: publishes
        the block that ``new`` tokens fill, or gives the row its next one."""
        block_size, max_tokens = self.block_size, self.max_model_len
        written = (computed if computed < max_tokens else max_tokens) + new
        wanted = written + lookahead
        needed = -(-(wanted if wanted < max_tokens else max_tokens) // block_size)
        hashes = request.block_hashes
        publish = 0
        if self.enable_caching:
            num_tokens = request.num_tokens
            publish = (written if written < num_tokens else num_tokens) // block_size
            publish = min(publish, needed, len(hashes))
        blocks = self.empty_kv_cache_blocks
        if needed > row.held_blocks:
            ever = request.num_prompt_tokens + request.max_tokens + lookahead
            limit = -(-(ever if ever < max_tokens else max_tokens) // block_size)
            added = self.pool.grow(row.handle, 0, 0, needed, 0, 0, limit, 0, publish, hashes)
            if added is None:
                self._observers.blocks_left()  # the range cap may have cost some
                return None
            row.held_blocks = needed
            blocks = TagmaKVCacheBlocks(added)
        elif publish > row.published_blocks:
            self.pool.publish(row.handle, publish, hashes)
        if self._observers.watching:
            self._observers.allocated((), blocks.blocks)
            self._observers.stored(request, row.published_blocks, publish)
        if publish > row.published_blocks:
            row.published_blocks = publish
        row.settle(block_size, self.enable_caching)
        return blocks

    def _allocate(
        self,
        request: Request,
        row: RequestRow | None,
        num_new_tokens: int,
        num_new_computed_tokens: int,
        hits: tuple[BlockRanges, ...],
        num_lookahead_tokens: int,
        delay_cache_blocks: bool,
        num_encoder_tokens: int,
        full_sequence_must_fit: bool,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
    ) -> TagmaKVCacheBlocks | None:
        """:meth:`allocate_slots` for everything else. Tokens that a connector brings count as
        computed ones; ``hits``, one for each group, hold their blocks."""
        if num_encoder_tokens:
            given = f"{num_encoder_tokens=}"
            support.refuse("encoder-decoder", given, option="what allocate_slots was given")
        if num_new_tokens == 0 and num_new_computed_tokens == 0:
            raise ValueError(
                "num_new_tokens must be greater than 0 when there are no computed tokens to adopt"
            )

        block_size, max_tokens = self.block_size, self.max_model_len
        total = request.num_computed_tokens + num_new_computed_tokens
        total = total if total < max_tokens else max_tokens
        wanted = total + num_new_tokens + num_lookahead_tokens
        needed = -(-(wanted if wanted < max_tokens else max_tokens) // block_size)
        num_tokens = request.num_tokens
        publish = 0
        if self.enable_caching and not delay_cache_blocks:
            written = total + num_new_tokens
            publish = (written if written < num_tokens else num_tokens) // block_size
            publish = min(publish, needed, len(request.block_hashes))
        prompt = -(-(num_tokens if num_tokens < max_tokens else max_tokens) // block_size)
        ever = request.num_prompt_tokens + request.max_tokens + num_lookahead_tokens
        limit = -(-(ever if ever < max_tokens else max_tokens) // block_size)
        watermark = 0
        if has_scheduled_reqs and request.status in _ADMISSION:
            watermark = self.watermark_blocks
        hit = hits[0]  # all groups' are equally long
        gate = prompt if full_sequence_must_fit else 0
        hashes = request.block_hashes
        group_rows = self._group_rows
        demand = Demand(watermark, reserved_blocks, needed, gate, prompt, limit)
        if row is None:
            if group_rows is None:
                admitted = self.pool.admit(
                    watermark, reserved_blocks, hit, *demand[2:], 0, publish, hashes
                )
            else:
                admitted = group_rows.admit(demand, hits, total, hashes)
            if admitted is None:
                self._observers.blocks_left()  # the range cap may have cost some
                return None
            handle, added = admitted
            row = self._rows[request.request_id] = RequestRow(handle)
            self._request_of[handle] = request.request_id
            row.held_blocks = row.published_blocks = len(hit)
            if group_rows is not None:
                row.next_skip = group_rows.next_skip(total)
        else:
            if len(hit):
                raise ValueError(
                    f"request {request.request_id} holds {row.held_blocks} blocks already and "
                    f"cannot adopt a prefix hit of {len(hit)}"
                )
            if group_rows is None:
                grown = self.pool.grow(row.handle, *demand, 0, publish, hashes)
            else:
                processed = max(0, total - request.num_in_flight_tokens)
                grown = group_rows.grow(row.handle, demand, processed, hashes)
                row.next_skip = group_rows.next_skip(processed)
            if grown is None:
                self._observers.blocks_left()  # the range cap may have cost some
                return None
            if request.status in _ADMISSION:  # its whole row goes to the worker
                self.pool.hold(row.handle)
                self._unpin(row)  # if it was received, all of it has arrived
            added = grown
        if row.held_blocks < needed:
            row.held_blocks = needed
        if self._observers.watching:
            self._observers.allocated(hits, added)
            if group_rows is None:
                self._observers.stored(request, row.published_blocks, publish)
        if publish > row.published_blocks:
            if group_rows is not None:
                group_rows.publish(request, row.handle, publish)
            row.published_blocks = publish
        row.settle(block_size, self.enable_caching)
        if delay_cache_blocks:
            self._pin(row, "receiving")
        return TagmaKVCacheBlocks(added) if any(added) else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publishes the full blocks among the first ``num_computed_tokens`` tokens. Monotone: what
        is published already stays. O(blocks published)."""
        row = self._rows.get(request.request_id)
        if not self.enable_caching or row is None:
            return
        publish = min(num_computed_tokens // self.block_size, len(request.block_hashes))
        publish = min(publish, row.held_blocks)
        if publish <= row.published_blocks:
            return
        if self._group_rows is None:
            self.pool.publish(row.handle, publish, request.block_hashes)
            self._observers.stored(request, row.published_blocks, publish)
        else:
            self._group_rows.publish(request, row.handle, publish)
        row.published_blocks = publish
        row.settle(self.block_size, self.enable_caching)

    # --- free -------------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Releases a request's blocks, tail first; unknown requests are ignored (an abort can come
        before the first allocation). O(blocks)."""
        row = self._rows.pop(request.request_id, None)
        if row is None:
            return
        del self._request_of[row.handle]
        if row.pins:
            self._unpin(row)
        self.pool.free(row.handle)
        self._observers.blocks_left()

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; False, and nothing changes, while a request holds a block."""
        if not self.pool.reset():
            _logger.warning(
                "The prefix cache was not reset: %d blocks are held by %d requests",
                self.pool.stats()["live_blocks"],
                len(self._rows),
            )
            return False
        self._observers.cleared()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        _logger.info("The prefix cache was reset")
        return True

    # --- what the scheduler reads -----------------------------------------------------------------

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Deprecated in vLLM; zero for each group."""
        return [0] * self.num_kv_cache_groups

    def take_kv_cache_block_copies(self) -> tuple[list[tuple[int, int]], list[Any]]:
        """Block copies (from, to) for the worker to make before the step's forward pass, all
        sources read before a destination is written; and the blocks they retain: none."""
        return self.pool.take_copies(), []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Mamba states for a connector: none."""
        return {}

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call, in order."""
        return self._observers.take_events()

    @property
    def usage(self) -> float:
        """Share of the pool that requests reference, 0 to 1; idle cached blocks count as free."""
        return 1.0 - self.pool.num_free / self.pool.capacity

    # --- statistics -------------------------------------------------------------------------------

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Counts an admission's hit tokens, unless the request does not read the cache."""
        if (
            self.prefix_cache_stats is None
            or not self.enable_caching
            or request.skip_reading_prefix_cache
        ):
            return
        self.prefix_cache_stats.record(
            num_tokens=request.num_tokens,
            num_hits=num_hits,
            preempted=request.num_preemptions > 0,
        )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The statistics since the last call, or None if they are not kept."""
        if self.prefix_cache_stats is None:
            return None
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def check_invariants(self) -> None:
        """Checks the laws of ``docs/invariants.md``; raises :class:`InvariantError`. O(blocks)."""
        require_manager_laws(
            self.pool, self._rows, self._row_blocks, self.num_kv_cache_groups, self._num_pins()
        )
