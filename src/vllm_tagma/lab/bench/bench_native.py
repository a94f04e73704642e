"""The native scenarios: the core timed inside C++ (``csrc/bench/``), no Python call on the clock.

Groups carry the names of the published report: ``kv_coord_map`` and ``kv_allocator``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_tagma.lab import _bench
from vllm_tagma.lab.bench.bench_plan import Effort, Planned
from vllm_tagma.lab.bench.bench_timing import Measure, Sample


@dataclass(frozen=True, kw_only=True)
class _Native:
    """One scenario: variants by name, each a benchmark of the native registry."""

    name: str
    title: str
    iterations: int
    variants: Mapping[str, str]
    ours: str = "tagma"
    baseline: str | None = None
    target: float | None = None
    note: str = ""


_SCENARIOS = (
    _Native(
        name="kv_coord_map/single_offset",
        title="byte offset of one (layer, block, token)",
        iterations=200_000,
        variants={"tagma": "kv_coord_map/single_offset"},
    ),
    _Native(
        name="kv_coord_map/decode_walk",
        title="offsets of one new token in 32 layers",
        iterations=50_000,
        variants={"tagma": "kv_coord_map/decode_walk"},
    ),
    _Native(
        name="kv_coord_map/context_walk_4k",
        title="offsets of 4,096 tokens of one layer",
        iterations=400,
        variants={"tagma": "kv_coord_map/context_walk_4k"},
    ),
    _Native(
        name="kv_allocator/allocate_release",
        title="allocate and release 64 blocks",
        iterations=20_000,
        variants={"tagma": "kv_allocator/allocate_release"},
    ),
    _Native(
        name="kv_allocator/grow_in_place",
        title="grow by one block, a new request every 32",
        iterations=100_000,
        variants={"tagma": "kv_allocator/grow_in_place"},
    ),
    _Native(
        name="kv_allocator/prefix_acquire_release",
        title="acquire and release a cached prefix of 64 blocks",
        iterations=20_000,
        variants={"tagma": "kv_allocator/prefix_acquire_release"},
    ),
    _Native(
        name="kv_allocator/evict_cache_only",
        title="evict the least recently used cached block",
        iterations=60_000,
        variants={"tagma": "kv_allocator/evict_cache_only"},
    ),
    _Native(
        name="kv_allocator/churn_85",
        title="allocate or release at 85 % load, hole index against std::map best fit",
        iterations=50_000,
        variants={
            "holes": "kv_allocator/churn_85/holes",
            "std::map": "kv_allocator/churn_85/tree",
            "allocator": "kv_allocator/churn_85/allocator",
        },
        ours="holes",
        baseline="std::map",
        target=2.5,
        note=(
            "65,536 blocks, counts log-uniform in 1..1,024. 'holes' finds and returns ranges as "
            "the tree does; 'allocator' adds what the tree has not: placement with headroom, "
            "several ranges when none fits, references and double-free checks per block "
            "(148 blocks a range on average)."
        ),
    ),
    _Native(
        name="kv_allocator/prompt_8192",
        title="place a prompt of 8,192 blocks in a churned pool of 131,072, 85 % full",
        iterations=200,
        variants={"tagma": "kv_allocator/prompt_8192"},
        note=(
            "Holes only, as when nothing is cached: evictions and moves come on top. The counter "
            "'ranges' is the sum over the timed calls."
        ),
    ),
    _Native(
        name="kv_slot_mapping/prefill_4k",
        title="slots of a 4,096-token prefill in 4 ranges",
        iterations=2_000,
        variants={
            "range": "kv_slot_mapping/prefill_4k/range",
            "paged": "kv_slot_mapping/prefill_4k/paged",
            "shift": "kv_slot_mapping/prefill_4k/paged_shift",
        },
        ours="range",
        baseline="paged",
        note="'shift' is the paged loop for a block size known to be a power of two.",
    ),
    _Native(
        name="kv_slot_mapping/decode_512",
        title="slots of 512 decoding requests",
        iterations=5_000,
        variants={
            "range": "kv_slot_mapping/decode_512/range",
            "paged": "kv_slot_mapping/decode_512/paged",
            "shift": "kv_slot_mapping/decode_512/paged_shift",
        },
        ours="range",
        baseline="paged",
        note="'shift' is the paged loop for a block size known to be a power of two.",
    ),
)


def native_scenarios(effort: Effort) -> list[Planned]:
    """The scenarios of the native registry."""
    return [
        Planned(
            name=scenario.name,
            group=scenario.name.partition("/")[0],
            title=scenario.title,
            iterations=effort.calls(scenario.iterations),
            ours=scenario.ours,
            baseline=scenario.baseline,
            target=scenario.target,
            note=scenario.note,
            open=functools.partial(_open, scenario, effort.calls(scenario.iterations)),
        )
        for scenario in _SCENARIOS
    ]


@contextmanager
def _open(scenario: _Native, iterations: int) -> Iterator[dict[str, Measure]]:
    yield {
        variant: functools.partial(_measure, benchmark, iterations)
        for variant, benchmark in scenario.variants.items()
    }


def _measure(benchmark: str, iterations: int) -> Sample:
    nanoseconds, counters = _bench.bench(benchmark, iterations)
    return Sample(value=nanoseconds / iterations, counters=dict(counters))
