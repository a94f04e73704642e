"""The native benchmarks: names, counters, errors. Times are not looked at."""

from __future__ import annotations

import pytest

from vllm_tagma.lab import _bench
from vllm_tagma.lab.bench.bench_native import native_scenarios
from vllm_tagma.lab.bench.bench_plan import QUICK


def test_every_native_benchmark_belongs_to_a_scenario() -> None:
    scenarios = native_scenarios(QUICK)
    used: set[str] = set()
    for scenario in scenarios:
        with scenario.open() as measures:
            used |= {measure.args[0] for measure in measures.values()}  # type: ignore[attr-defined]
            assert scenario.ours in measures
            assert scenario.baseline is None or scenario.baseline in measures
    assert used == set(_bench.bench_names())


@pytest.mark.parametrize("name", _bench.bench_names())
def test_it_runs(name: str) -> None:
    nanoseconds, counters = _bench.bench(name, 20)
    assert nanoseconds > 0
    assert counters.get("failures", 0) >= 0


def test_loads_per_position() -> None:
    """One prefill of 4,096 positions in 4 ranges: a load each, or a look-up a range."""
    _, paged = _bench.bench("kv_slot_mapping/prefill_4k/paged", 1)
    _, ranges = _bench.bench("kv_slot_mapping/prefill_4k/range", 1)
    assert paged == {"positions": 4096, "loads": 4096}
    assert ranges == {"positions": 4096, "loads": 4}


def test_the_allocator_never_fails_where_best_fit_does() -> None:
    """At 85 % load a single best-fitting hole is sometimes missing; several ranges never are."""
    _, tree = _bench.bench("kv_allocator/churn_85/tree", 20_000)
    _, ours = _bench.bench("kv_allocator/churn_85/allocator", 20_000)
    assert tree["failures"] > 0
    assert ours["failures"] == 0


def test_eviction_refills_when_the_pool_runs_out() -> None:
    nanoseconds, _ = _bench.bench("kv_allocator/evict_cache_only", 70_000)
    assert nanoseconds > 0


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match=r"no benchmark is named 'nothing'; see bench_names\(\)"):
        _bench.bench("nothing", 1)
    with pytest.raises(ValueError, match="iterations=0 is below 1"):
        _bench.bench("kv_coord_map/single_offset", 0)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        _bench.bench("kv_coord_map/single_offset")  # type: ignore[call-arg]
