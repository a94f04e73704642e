"""The metrics of the backend as data: names, meanings, and how they travel to ``/metrics``.

The engine core knows the figures and another process serves ``/metrics``. vLLM carries its
``SchedulerStats`` between the two; the figures go along as entries of one of its dicts, under a
prefix, and are taken out before vLLM looks at it (``integration/stats.py``,
``integration/stat_logger.py``). Gauges are sent as they stand, counters as what was added since
the last message: several API servers each get a share of the messages, and Prometheus adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Final

WIRE_PREFIX: Final = "tagma:"
"""Of our keys in vLLM's dict; vLLM's own are words without a colon."""

NAME_PREFIX: Final = "vllm:tagma_"

Stats = Mapping[str, int]
"""``Pool.stats()``, or what is left of it after the journey: the sent keys only."""


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """A figure that goes up and down. ``value`` computes it from the gauges' ``keys``."""

    name: str
    documentation: str
    keys: tuple[str, ...]
    value: Callable[[Stats], float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A total that only grows; ``total`` reads it from ``Pool.stats()``.

    ``key`` names it on the way. Prometheus adds ``_total`` to the name.
    """

    name: str
    documentation: str
    key: str
    total: Callable[[Stats], int]
    labels: Mapping[str, str] = field(default_factory=dict)


def _plain(name: str, documentation: str, key: str) -> Gauge:
    return Gauge(name=name, documentation=documentation, keys=(key,), value=lambda s: s[key])


def _one_range_share(stats: Stats) -> float:
    # Nobody is in more ranges than one where nobody is: 0 would raise alarms on an idle server.
    return stats["one_range_rows"] / stats["rows"] if stats["rows"] else 1.0


_POOL_BLOCKS: Final = NAME_PREFIX + "pool_blocks"
_POOL_BLOCKS_TEXT: Final = (
    "KV-cache blocks by state: 'live' = held by a request, 'cached' = idle in the prefix cache, "
    "'hole' = free and empty. The sum is the size of the pool."
)

GAUGES: Final[tuple[Gauge, ...]] = (
    _plain(NAME_PREFIX + "requests", "Number of requests that hold KV-cache blocks.", "rows"),
    _plain(
        NAME_PREFIX + "ranges",
        "Number of ranges in which these requests hold their blocks, shared prefixes included.",
        "row_ranges",
    ),
    _plain(
        NAME_PREFIX + "max_ranges", "Largest number of ranges of one request.", "max_row_ranges"
    ),
    Gauge(
        name=NAME_PREFIX + "one_range_perc",
        documentation="Share of the requests that hold all their blocks in one range. "
        "1 means 100 percent; also 1 without requests.",
        keys=("one_range_rows", "rows"),
        value=_one_range_share,
    ),
    *(
        Gauge(
            name=_POOL_BLOCKS,
            documentation=_POOL_BLOCKS_TEXT,
            keys=(key,),
            value=lambda s, key=key: s[key],  # type: ignore[misc]
            labels={"state": state},
        )
        for state, key in (
            ("live", "live_blocks"),
            ("cached", "idle_blocks"),
            ("hole", "hole_blocks"),
        )
    ),
    _plain(NAME_PREFIX + "holes", "Number of holes: runs of free, empty blocks.", "holes"),
    _plain(
        NAME_PREFIX + "largest_hole_blocks", "Blocks in the largest hole.", "largest_hole_blocks"
    ),
    _plain(
        NAME_PREFIX + "headroom_blocks",
        "Blocks that a new request is given room for behind its prompt. An estimate; the room is "
        "not reserved.",
        "headroom_blocks",
    ),
    _plain(
        NAME_PREFIX + "slack_blocks",
        "Oldest cached blocks that may be evicted before their turn. Grows while nobody hits them.",
        "slack_blocks",
    ),
    _plain(
        NAME_PREFIX + "pinned_blocks",
        "Blocks that a KV connector receives into or sends from. They are neither moved nor freed.",
        "pinned_blocks",
    ),
)

_MOVED: Final = NAME_PREFIX + "moved_blocks"
_MOVED_TEXT: Final = (
    "Number of blocks moved to make room for ranges: 'cached' = idle, 'live' = of running requests."
)

COUNTERS: Final[tuple[Counter, ...]] = (
    Counter(
        name=NAME_PREFIX + "evicted_blocks",
        documentation="Number of cached blocks evicted to make room.",
        key="evictions",
        total=lambda s: s["evictions"],
    ),
    Counter(
        name=NAME_PREFIX + "cap_evictions",
        documentation="Times that blocks were evicted out of order to stay below the limit of "
        "ranges per request.",
        key="cap_evictions",
        total=lambda s: s["cap_evictions"],
    ),
    Counter(
        name=NAME_PREFIX + "cap_refusals",
        documentation="Times that a request got no blocks because of the limit of ranges per "
        "request, although enough blocks were free.",
        key="cap_refusals",
        total=lambda s: s["cap_refusals"],
    ),
    Counter(
        name=_MOVED,
        documentation=_MOVED_TEXT,
        key="moved_cached_blocks",
        total=lambda s: s["moved_blocks"] - s["moved_live_blocks"],
        labels={"state": "cached"},
    ),
    Counter(
        name=_MOVED,
        documentation=_MOVED_TEXT,
        key="moved_live_blocks",
        total=lambda s: s["moved_live_blocks"],
        labels={"state": "live"},
    ),
)

REQUEST_RANGES: Final = NAME_PREFIX + "request_ranges"
"""The histogram over ended requests."""

REQUEST_RANGES_TEXT: Final = (
    "Histogram of the number of ranges a request held when it ended, shared prefix included."
)
REQUEST_RANGES_BUCKETS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)

PART_BLOCKS: Final = NAME_PREFIX + "pool_part_blocks"
PART_BLOCKS_TEXT: Final = (
    "KV-cache blocks in each of equal parts of the pool, by address: 'live' = held by a request, "
    "'cached' = idle in the prefix cache. The rest are holes. `tagma map` draws it."
)
PART_STATES: Final = ("live", "cached")

GAUGE_KEYS: Final = tuple(dict.fromkeys(key for gauge in GAUGES for key in gauge.keys))

_GAUGE_WIRE: Final = {key: WIRE_PREFIX + key for key in GAUGE_KEYS}
_GAUGE_OF: Final = {wire: key for key, wire in _GAUGE_WIRE.items()}
_ADDED: Final = WIRE_PREFIX + "added:"
_ENDED: Final = WIRE_PREFIX + "ended:"
_LIVE: Final = WIRE_PREFIX + "live:"
_CACHED: Final = WIRE_PREFIX + "cached:"


@dataclass(frozen=True, kw_only=True)
class Message:
    """What the engine core tells a front end in one step.

    ``gauges``: values by key, complete. ``added``: growth of counters by key, absent keys
    are zero. ``ended``: ranges of a request -> how many requests ended with so many. ``parts``:
    number -> (live, cached) blocks, for the parts of the map that changed.
    """

    gauges: Stats
    added: Stats = field(default_factory=dict)
    ended: Mapping[int, int] = field(default_factory=dict)
    parts: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def pack(self) -> dict[str, int]:
        """The message as entries for a dict of int values. O(entries)."""
        entries = {_GAUGE_WIRE[key]: value for key, value in self.gauges.items()}
        for key, value in self.added.items():
            entries[_ADDED + key] = value
        for ranges, requests in self.ended.items():
            entries[_ENDED + str(ranges)] = requests
        for number, (live, cached) in self.parts.items():
            entries[_LIVE + str(number)] = live
            entries[_CACHED + str(number)] = cached
        return entries


def take_message(entries: MutableMapping[str, int]) -> Message | None:
    """Remove our entries from vLLM's dict and return what they say; ``None`` if there are none."""
    gauges: dict[str, int] = {}
    numbered: dict[str, dict[int, int]] = {_ENDED: {}, _LIVE: {}, _CACHED: {}}
    added: dict[str, int] = {}
    for wire in [key for key in entries if key.startswith(WIRE_PREFIX)]:
        value = entries.pop(wire)
        head, _, tail = wire.rpartition(":")
        if wire in _GAUGE_OF:
            gauges[_GAUGE_OF[wire]] = value
        elif head + ":" == _ADDED:
            added[tail] = value
        else:
            numbered[head + ":"][int(tail)] = value
    live, cached = numbered[_LIVE], numbered[_CACHED]
    if not gauges:
        return None
    return Message(
        gauges=gauges,
        added=added,
        ended=numbered[_ENDED],
        parts={number: (live[number], cached[number]) for number in live},
    )
