"""Pools as text: a row of cells by address, coloured by what lies there, and the key figures.

While somebody watches, a second row marks where blocks came and went, and a line says what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from rich.console import Console, Group
from rich.text import Text

from vllm_tagma.lab.pool_map.map_source import EnginePool, Part

_COLOURS: Final = ((222, 92, 52), (66, 133, 190), (72, 72, 72))
"""Red, green, blue of live, cached and hole; a cell's colour is their mixture."""

_CELLS: Final = ("█▒·", "#+.")
"""Characters of a cell that is mostly live, cached, hole: for terminals with and without UTF-8."""


_MARKS: Final = "+- "
"""More of the cell's blocks are live than before, fewer, as many."""


def draw(
    pools: Sequence[EnginePool], console: Console, *, before: Sequence[EnginePool] | None = None
) -> Group:
    """All pools, for the width and encoding of ``console``; works without colours too.

    ``before``: the same pools when they were last looked at; then the changes are drawn as well.
    """
    cells = _CELLS[0 if console.encoding.startswith("utf") else 1]
    lines: list[Text] = []
    for pool in pools:
        head = f"engine {pool.engine} "
        mixed = console.color_system in ("256", "truecolor")
        lines.append(_row(pool, head, width=console.width, cells=cells, mixed=mixed))
        if before is not None and pool.blocks:
            old = next((old for old in before if old.engine == pool.engine), pool)
            lines.append(_marks(pool, old, indent=len(head), width=console.width))
            lines.append(Text(f"  {changes(old, pool)}", style="bold"))
        lines += [Text(f"  {line}") for line in _figures(pool)]
    lines.append(_legend(cells))
    return Group(*lines)


def changes(old: EnginePool, new: EnginePool) -> str:
    """What happened to a pool between two looks, in words; totals that restarted count anew."""
    words = [
        f"{name} {getattr(new, name) - getattr(old, name):+,}"
        for name in _LEVELS
        if getattr(new, name) != getattr(old, name)
    ]
    for name, key in _TOTALS.items():
        now, then = getattr(new, key), getattr(old, key)
        grown = now - then if now >= then else now
        if grown:
            words.append(f"{name} {grown:,}")
    return f"since the last look: {', '.join(words) or 'no change'}"


_LEVELS: Final = ("requests", "ranges", "live", "cached", "holes", "pinned")
"""Fields of :class:`EnginePool`, under whose names their changes are told."""

_TOTALS: Final = {
    "evicted": "evicted",
    "moved cached": "moved_cached",
    "moved live": "moved_live",
    "transfers": "transfers",
    "runs sent": "transfer_runs",
    "transfers block by block": "transfers_unmerged",
}
"""What is said of a change -> the field of :class:`EnginePool`."""


def _marks(pool: EnginePool, old: EnginePool, *, indent: int, width: int) -> Text:
    """Below each cell whether more or fewer of its blocks are live than before."""
    if not pool.parts or len(pool.parts) != len(old.parts):
        return Text()
    room = max(width - indent, 1)
    now, then = merged(pool.parts, room), merged(old.parts, room)
    marks = [
        _MARKS[0 if new[0] > past[0] else 1 if new[0] < past[0] else 2] * (room // len(now))
        for new, past in zip(now, then, strict=True)
    ]
    return Text(" " * indent + "".join(marks), no_wrap=True, overflow="crop")


def merged(parts: Sequence[Part], width: int) -> list[Part]:
    """At most ``width`` parts with the same sums; neighbours are joined evenly."""
    count = min(len(parts), max(width, 1))
    bounds = [i * len(parts) // count for i in range(count + 1)]
    return [
        (
            sum(part[0] for part in parts[begin:end]),
            sum(part[1] for part in parts[begin:end]),
            sum(part[2] for part in parts[begin:end]),
        )
        for begin, end in pairwise(bounds)
    ]


def _row(pool: EnginePool, head: str, *, width: int, cells: str, mixed: bool) -> Text:
    row = Text(head, style="bold", no_wrap=True, overflow="crop")
    if not pool.blocks:
        return row.append("no figures yet: the engine sends them with its first request", "dim")
    if not pool.parts:
        return row.append("no map: the server runs with tagma.pool_map_parts 0", "dim")
    room = max(width - len(head), 1)
    shown = merged(pool.parts, room)
    for live, cached, size in shown:
        shares = (live, cached, size - live - cached)
        most = shares.index(max(shares))
        # Sixteen colours have no mixtures: they come out as unrelated colours.
        style = _rgb(_mixture(shares, size) if mixed else _COLOURS[most])
        row.append(cells[most] * (room // len(shown)), style=f"not bold {style}")
    return row


def _mixture(shares: tuple[int, int, int], size: int) -> tuple[int, ...]:
    if not size:  # more parts than blocks
        return _COLOURS[2]
    return tuple(
        round(sum(colour[i] * share for colour, share in zip(_COLOURS, shares, strict=True)) / size)
        for i in range(3)
    )


def _rgb(colour: tuple[int, ...]) -> str:
    return "rgb({},{},{})".format(*colour)


def _figures(pool: EnginePool) -> list[str]:
    if not pool.blocks:
        return []
    lines = [
        f"{pool.model}: {pool.blocks:,} blocks, {pool.live / pool.blocks:.0%} live, "
        f"{pool.cached / pool.blocks:.0%} cached, {pool.hole / pool.blocks:.0%} in {pool.holes:,} "
        f"holes, the largest {pool.largest_hole:,}",
        f"{pool.requests:,} requests in {pool.ranges:,} ranges: mean {pool.mean_ranges:.2f}, "
        f"max {pool.max_ranges:,}, {pool.one_range_share:.0%} in one; headroom {pool.headroom:,}",
        f"evicted {pool.evicted:,}, moved {pool.moved_cached:,} cached and {pool.moved_live:,} "
        f"live blocks",
    ]
    if pool.pinned or pool.transfers or pool.transfers_unmerged:
        lines.append(
            f"pinned {pool.pinned:,} blocks; {pool.transfers:,} transfers in "
            f"{pool.transfer_runs:,} runs, {pool.transfers_unmerged:,} block by block"
        )
    if pool.cap_evictions or pool.cap_refusals:
        lines.append(
            f"limit of ranges reached: {pool.cap_evictions:,} evictions out of order, "
            f"{pool.cap_refusals:,} refusals"
        )
    return lines


def _legend(cells: str) -> Text:
    legend = Text("by address: ", style="dim")
    for name, cell, colour in zip(("live", "cached", "hole"), cells, _COLOURS, strict=True):
        legend.append(cell, style=f"not dim {_rgb(colour)}")
        legend.append(f" {name}  ")
    return legend
