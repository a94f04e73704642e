"""What the manager does where a request has a row in each of several KV-cache groups, or a window.

The rows of a request are equally long. A window's row begins with null blocks: those that no token
to come attends to. They are skipped when a request is admitted, and let go of as its tokens are
processed, between the admission gate and the capacity check, as in vLLM. Of a window's full blocks
only those enter the prefix cache that a later request can resume at (``group_needs.py``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm_tagma._native import NULL_BLOCK, BlockRanges, Pool
from vllm_tagma.group_hits import CommonHit, common_hit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from vllm_tagma.cache_groups import CacheGroups
    from vllm_tagma.group_needs import HeadNeeds
    from vllm_tagma.observers import Observers

NEVER: Final = sys.maxsize
"""Tokens that no request reaches."""


class Demand(NamedTuple):
    """What a request asks of each group, in blocks; see ``Pool.admit``."""

    watermark: int
    reserved: int
    blocks: int
    gate: int
    prompt: int
    limit: int


class GroupRows:
    """The rows of all groups in ``pool``, which was made for ``groups``."""

    def __init__(self, pool: Pool, groups: CacheGroups, observers: Observers) -> None:
        self._pool = pool
        self._windows = [group.window for group in groups.groups]
        self._retention = groups.retention
        self._order = groups.lookup_order()
        self._observers = observers

    def lookup(self, block_hashes: list[bytes], max_blocks: int) -> CommonHit:
        """What all groups have of at most ``max_blocks`` blocks. Changes nothing."""
        return common_hit(self._pool, self._order, block_hashes, min(max_blocks, len(block_hashes)))

    def admit(
        self, demand: Demand, hits: Sequence[BlockRanges], computed: int, hashes: list[bytes]
    ) -> tuple[int, tuple[BlockRanges, ...]] | None:
        """Opens rows that begin with the hits, or with null blocks in front of the first of the
        ``computed`` tokens that the next one attends to. Publishes nothing."""
        args: list[Any] = [demand.watermark, demand.reserved]
        heads = [
            0 if window is None else window.skipped_blocks(computed) for window in self._windows
        ]
        for window, hit, skip in zip(self._windows, hits, heads, strict=True):
            args += (_without_head(hit, skip), *_need(demand, window, skip), 0, hashes)
        admitted = self._pool.admit(*args)
        if admitted is not None:
            for group, (hit, skip) in enumerate(zip(hits, heads, strict=True)):
                if skip > len(hit):
                    self._pool.pass_over(admitted[0], min(skip, demand.blocks), group)
        return admitted

    def grow(
        self, handle: int, demand: Demand, processed: int, hashes: list[bytes]
    ) -> tuple[BlockRanges, ...] | None:
        """Lets go of what no token behind the ``processed`` ones attends to, even if it then gives
        nothing, and gives each row what it lacks. Publishes nothing."""
        args: list[Any] = [handle, demand.watermark, demand.reserved]
        for window in self._windows:
            skip = 0 if window is None else window.skipped_blocks(processed)
            args += (*_need(demand, window, skip), 0, hashes)
        return self._pool.grow(*args)

    def skip(self, handle: int, held_blocks: int, processed: int) -> None:
        """The letting go of :meth:`grow` alone."""
        for group, window in enumerate(self._windows):
            if window is not None:
                skip = min(window.skipped_blocks(processed), held_blocks)
                self._pool.skip(handle, skip, group)

    def next_skip(self, processed: int) -> int:
        """The least number of processed tokens at which a row has more to let go of."""
        return min(
            (w.next_skip(w.skipped_blocks(processed)) for w in self._windows if w is not None),
            default=NEVER,
        )

    def publish(self, request: Request, handle: int, blocks: int) -> None:
        """Publishes, of each row's leading blocks, those that a later request can use."""
        pool, hashes = self._pool, request.block_hashes
        # A resend needs its last token computed; a prompt that shares more than a window has kept
        # may be asked for again up to there.
        boundaries = (request.num_prompt_tokens - 1, request.shared_prefix_boundary)
        for group, window in enumerate(self._windows):
            first = pool.num_published(handle, group)
            if first >= blocks:
                continue
            spans = [(first, blocks)]
            if window is None:
                pool.publish(handle, blocks, hashes, group)
            else:
                spans = window.cached_spans(first, blocks, boundaries, self._retention)
                at = first
                for start, end in spans:
                    if start > at:
                        pool.pass_over(handle, start, group)
                    pool.publish(handle, end, hashes, group)
                    at = end
                if at < blocks:
                    pool.pass_over(handle, blocks, group)
            if self._observers.watching:
                nulls = _leading_nulls(pool.row_blocks(handle, group))
                kept = [(max(start, nulls), end) for start, end in spans if end > nulls]
                self._observers.stored(request, first, blocks, group, kept)

    def published(self, handle: int) -> int:
        """Leading blocks that are published, or passed over, in every group."""
        return min(self._pool.num_published(handle, g) for g in range(len(self._windows)))


def _need(demand: Demand, window: HeadNeeds | None, skip: int) -> tuple[int, int, int, int, int]:
    """Blocks, gate, prompt, limit and skip of one group. A window never holds more at a time than
    its gate, so no room is wished for beyond."""
    blocks, gate, prompt, limit = demand[2:]
    if window is None:
        return blocks, gate, prompt, limit, 0
    most = skip + window.gate_blocks
    return blocks, min(gate, window.gate_blocks), min(prompt, most), min(limit, most), skip


def _without_head(hit: BlockRanges, skip: int) -> BlockRanges:
    """The hit with null blocks in place of the first ``skip``."""
    skip = min(skip, len(hit))
    if not skip or _leading_nulls(hit) >= skip:
        return hit
    return BlockRanges([(NULL_BLOCK, skip), *hit.sliced(skip, len(hit)).ranges()])


def _leading_nulls(blocks: BlockRanges) -> int:
    ranges = blocks.ranges()
    return ranges[0][1] if ranges and ranges[0][0] == NULL_BLOCK else 0
