"""How many prompt tokens one ``hash_id`` of a trace covers, found from the lengths themselves.

``n`` ids for ``tokens`` tokens fit a block of ``size`` tokens if ``n == ceil(tokens / size)``: all
sizes from ``ceil(tokens / n)`` to ``(tokens - 1) // (n - 1)``. A few lines leave a single size; and
any line of two ids or more leaves at most one power of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from vllm_tagma.lab.replay.trace import TraceError

MOONCAKE_BLOCK_TOKENS = 512
MAX_BLOCK_TOKENS = 1 << 20
LINES_READ = 5_000
"""Lines that are looked at; one that is broken is outvoted by the others."""


def found(lengths: Iterable[tuple[int, int]], name: str) -> int:
    """The block size that most of the lines agree on; each is ``(tokens, ids)``. O(n log n).

    Of several, Mooncake's 512 if it is among them, or else the only power of two. Prompts of one
    block fit any size that holds them: then it makes no difference, and it is 512 or the next power
    of two that does.

    Raises:
        TraceError: ``lengths`` leave more than one size.
    """
    spans = [span for tokens, ids in lengths if (span := _sizes(tokens, ids)) is not None]
    best = _agreed(spans)
    if any(low <= MOONCAKE_BLOCK_TOKENS <= high for low, high in best):
        return MOONCAKE_BLOCK_TOKENS
    sizes = {low for low, high in best if low == high}
    powers = {1 << bit for bit in range(21) if any(low <= 1 << bit <= high for low, high in best)}
    if len(best) == 1 and len(sizes) == 1:
        return sizes.pop()
    if len(best) == 1 and best[0][1] == MAX_BLOCK_TOKENS and powers:
        return min(powers)
    if len(powers) == 1:
        return powers.pop()
    fitting = " or ".join(f"{low} to {high}" if low < high else str(low) for low, high in best[:4])
    raise TraceError(
        f"{name} does not tell how many tokens one of its hash_ids covers: {fitting} would fit. "
        f"Say it with --trace-block-size."
    )


def _sizes(tokens: int, ids: int) -> tuple[int, int] | None:
    """Smallest and largest size that makes ``ids`` blocks of ``tokens`` tokens."""
    low = -(-tokens // ids)
    high = min((tokens - 1) // (ids - 1), MAX_BLOCK_TOKENS) if ids > 1 else MAX_BLOCK_TOKENS
    return (low, high) if low <= high else None


def _agreed(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stretches of sizes that the most spans have in common; every size if there is none."""
    if not spans:
        return [(1, MAX_BLOCK_TOKENS)]
    steps: dict[int, int] = {}
    for low, high in spans:
        steps[low] = steps.get(low, 0) + 1
        steps[high + 1] = steps.get(high + 1, 0) - 1
    edges = sorted(steps)
    depth, most = 0, 0
    best: list[tuple[int, int]] = []
    for edge, after in pairwise(edges):
        depth += steps[edge]
        if depth > most:
            most, best = depth, []
        if depth == most:
            best.append((edge, after - 1))
    return best
