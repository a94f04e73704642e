"""The longest prefix that every KV-cache group has, as vLLM's coordinators find it.

Each group answers by its own rule (``Pool.lookup``): full attention has whatever is shorter than
its hit too, a window may have nothing between two hits. So a shorter answer of one group sends the
others to look again, until all agree. vLLM looks groups of one spec up together; agreeing group by
group ends at the same length, since a window's hit at a length is one in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_tagma._native import BlockRanges, Pool


class LookupGroup(NamedTuple):
    """Groups whose layers have one spec. ``nested``: full attention, a part of a hit is a hit."""

    groups: tuple[int, ...]
    nested: bool


class CommonHit(NamedTuple):
    """A hit of ``num_blocks`` blocks in each group, null blocks of windows included.

    ``longest_blocks``: what the group that is asked first has by itself. Where it is more than
    ``num_blocks``, a window has not kept a prefix that requests share (vLLM's shared-prefix
    boundary).
    """

    blocks: tuple[BlockRanges, ...]
    num_blocks: int
    longest_blocks: int


def common_hit(
    pool: Pool, order: Sequence[LookupGroup], block_hashes: list[bytes], max_blocks: int
) -> CommonHit:
    """What all groups have of at most ``max_blocks`` blocks of one size.

    ``order`` names each group of the pool once, full attention first: one pass over the hashes
    bounds what windows search. Changes nothing. O(look-ups x ``max_blocks``); with one window spec
    there is one look-up a group, as nothing shorter than the windows' answer is asked for.
    """
    found: dict[int, BlockRanges] = {}
    length = max_blocks
    longest: int | None = None
    while True:
        before = length
        for groups, nested in order:
            length = _agree(pool, groups, nested, block_hashes, length, found)
            if longest is None:
                longest = length
        if length == before or not length:
            break
    return CommonHit(
        tuple(found[group].truncated(length) for group in sorted(found)), length, longest or 0
    )


def _agree(
    pool: Pool,
    groups: tuple[int, ...],
    nested: bool,
    block_hashes: list[bytes],
    length: int,
    found: dict[int, BlockRanges],
) -> int:
    """The most blocks, at most ``length``, at which each of ``groups`` has a hit."""
    while True:
        before = length
        for group in groups:
            hit = found.get(group)
            if hit is None or (len(hit) > length and not nested):
                hit = found[group] = pool.lookup(block_hashes, length, group)
            length = min(length, len(hit))
        if length == before or nested:
            return length
