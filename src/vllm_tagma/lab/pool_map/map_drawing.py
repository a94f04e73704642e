"""Pools as text: a row of cells by address, coloured by what lies there, and the key figures."""

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


def draw(pools: Sequence[EnginePool], console: Console) -> Group:
    """All pools, for the width and encoding of ``console``; works without colours too."""
    cells = _CELLS[0 if console.encoding.startswith("utf") else 1]
    lines: list[Text] = []
    for pool in pools:
        head = f"engine {pool.engine} "
        mixed = console.color_system in ("256", "truecolor")
        lines.append(_row(pool, head, width=console.width, cells=cells, mixed=mixed))
        lines += [Text(f"  {line}") for line in _figures(pool)]
    lines.append(_legend(cells))
    return Group(*lines)


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
