"""What a window changes in a group's arithmetic: skipped heads, the gate, what is cached.

Plain numbers and vLLM's own rules (``SlidingWindowSpec`` and ``SlidingWindowManager``, and those of
chunked local attention), for groups whose blocks are as long as the scheduler's. Tokens, unless a
name says blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from vllm_tagma.group_spec import GroupSpec


class HeadNeeds(Protocol):
    """What the manager asks of a group whose rows lose their heads."""

    @property
    def pool_group(self) -> GroupSpec:
        """The group as the core knows it."""

    @property
    def gate_blocks(self) -> int:
        """The most blocks that a request holds at a time, by which it is admitted."""

    def skipped_blocks(self, processed_tokens: int) -> int:
        """Leading blocks that no token after the processed ones attends to."""

    def next_skip(self, skipped_blocks: int) -> int:
        """Processed tokens from which on more than ``skipped_blocks`` blocks are skipped."""

    def cached_spans(
        self, first: int, last: int, boundaries: Iterable[int], retention: int | None
    ) -> list[tuple[int, int]]:
        """Which of the full blocks [first, last) enter the prefix cache; see
        :meth:`WindowNeeds.cached_spans`."""


class ChunkNeeds(NamedTuple):
    """A group with chunked local attention: a token attends to its own chunk of ``chunk`` tokens,
    a multiple of the block size, from the chunk's first one on."""

    block_size: int
    chunk: int
    max_in_flight_tokens: int
    max_model_len: int

    @property
    def pool_group(self) -> GroupSpec:
        """A hit needs what its last chunk has in front of its end."""
        return GroupSpec("chunk", self.chunk // self.block_size)

    @property
    def gate_blocks(self) -> int:
        """The most blocks that a request holds at a time, by which it is admitted."""
        tokens = min(self.chunk + self.max_in_flight_tokens, self.max_model_len)
        return -(-tokens // self.block_size)

    def skipped_blocks(self, processed_tokens: int) -> int:
        """Blocks of the chunks in front of the next token's."""
        return processed_tokens // self.chunk * self.chunk // self.block_size

    def next_skip(self, skipped_blocks: int) -> int:
        """Processed tokens from which on more than ``skipped_blocks`` blocks are skipped."""
        return (skipped_blocks * self.block_size // self.chunk + 1) * self.chunk

    def cached_spans(
        self, first: int, last: int, boundaries: Iterable[int], retention: int | None
    ) -> list[tuple[int, int]]:
        """All of the full blocks [first, last): vLLM has no interval for chunks."""
        del boundaries, retention
        return [(first, last)] if first < last else []


class WindowNeeds(NamedTuple):
    """A sliding-window group. ``window``: tokens that a token attends to, itself included, >= 2."""

    block_size: int
    window: int
    max_in_flight_tokens: int
    max_model_len: int

    @property
    def pool_group(self) -> GroupSpec:
        """A hit needs the blocks that its last token attends to."""
        return GroupSpec("window", self.hit_blocks)

    @property
    def hit_blocks(self) -> int:
        """Blocks in a row that a hit needs at its end."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def gate_blocks(self) -> int:
        """The most blocks that a request holds at a time, by which it is admitted."""
        tokens = min(self.window - 1 + self.max_in_flight_tokens, self.max_model_len)
        return -(-tokens // self.block_size) + 1

    def skipped_blocks(self, processed_tokens: int) -> int:
        """Leading blocks that no token after the processed ones attends to."""
        return max(0, processed_tokens - self.window + 1) // self.block_size

    def next_skip(self, skipped_blocks: int) -> int:
        """Processed tokens from which on more than ``skipped_blocks`` blocks are skipped."""
        return (skipped_blocks + 1) * self.block_size + self.window - 1

    def cached_spans(
        self, first: int, last: int, boundaries: Iterable[int], retention: int | None
    ) -> list[tuple[int, int]]:
        """Which of the full blocks [first, last) enter the prefix cache: half-open spans, ascending
        and apart.

        ``retention`` is vLLM's ``prefix_cache_retention_interval``: None caches all; 0, the
        default, only the blocks that a hit needs at each of ``boundaries`` (positions at which a
        later request may resume); more, also at each multiple of it, which is a multiple of the
        block size. O(spans).
        """
        if retention is None:
            return [(first, last)] if first < last else []
        need = self.hit_blocks
        ends = {boundary // self.block_size for boundary in boundaries}
        if retention:
            step = retention // self.block_size
            # A tail that ends behind `last` may begin in front of it.
            ends.update(range((first // step + 1) * step, last + need + 1, step))
        spans: list[tuple[int, int]] = []
        for end in sorted(ends):
            start, stop = max(first, end - need, 0), min(last, end)
            if spans and start <= spans[-1][1]:
                start, stop = spans[-1][0], max(stop, spans[-1][1])
                if start < stop:
                    spans[-1] = (start, stop)
            elif start < stop:
                spans.append((start, stop))
        return spans
