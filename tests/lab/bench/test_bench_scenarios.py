"""Every scenario runs once, small, and compares what it says it compares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_tagma.lab.bench import (
    bench_engine,
    bench_manager,
    bench_memory,
    bench_plan,
    bench_requests,
    bench_scheduler,
)
from vllm_tagma.lab.bench.bench_command import scenarios
from vllm_tagma.lab.bench.bench_plan import Effort

TINY = Effort(quick=True, rounds=1, scale=0.0)


def _names() -> list[str]:
    return [p.name for p in scenarios(TINY, cpus=[])]


def test_names_are_unique_and_groups_are_their_first_part() -> None:
    planned = scenarios(TINY, cpus=[])
    names = [p.name for p in planned]
    assert len(set(names)) == len(names)
    assert {p.group for p in planned} == {
        "kv_coord_map",
        "kv_allocator",
        "kv_slot_mapping",
        "block_moves",
        "manager",
        "scheduler",
        "engine",
    }
    assert all(p.name.startswith(f"{p.group}/") for p in planned)


@pytest.mark.parametrize("name", [n for n in _names() if n.endswith(("/1k", "/64", "/memory"))])
def test_a_manager_scenario_measures_both(name: str) -> None:
    planned = bench_plan.selected(scenarios(TINY, cpus=[]), [name])
    measured, skipped = bench_plan.run(planned, effort=TINY)
    assert skipped == {}
    for scenario in measured:
        assert list(scenario.variants) == ["tagma", "vllm"]
        assert scenario.ratio is not None
        assert scenario.ratio.median > 0


def test_both_managers_are_in_the_same_state() -> None:
    """The pair that is timed agrees on hits, block counts and free blocks."""
    for variant in bench_requests.MANAGERS:
        kv = bench_requests.make_manager(variant, num_blocks=1_001)
        assert type(kv) is bench_requests.MANAGERS[variant]
        first = bench_requests.make_request("a", bench_requests.random_tokens(1_025, seed=1))
        second = bench_requests.make_request("b", bench_requests.random_tokens(1_025, seed=1))
        assert first.block_hashes == second.block_hashes
        bench_requests.admit(kv, first)
        assert kv.get_computed_blocks(second)[1] == 1_024
        before = list(second.block_hashes)
        bench_requests.fresh_hashes(second)
        assert second.block_hashes == before
        assert all(a is not b for a, b in zip(second.block_hashes, before, strict=True))
        assert kv.get_computed_blocks(second)[1] == 1_024
        assert len(kv.get_block_ids("a")[0]) == 65
        assert kv.block_pool.get_num_free_blocks() == 1_000 - 65
        bench_requests.release(kv, [first])
        assert kv.get_computed_blocks(second)[1] == 0


def test_a_pool_that_is_too_small_is_an_error() -> None:
    kv = bench_requests.make_manager("tagma", num_blocks=11)
    with pytest.raises(RuntimeError, match="too small for 1000 tokens"):
        bench_requests.admit(
            kv, bench_requests.make_request("a", bench_requests.random_tokens(1_000, seed=1))
        )


def test_memory_of_ours_is_mostly_native() -> None:
    sample = bench_memory._measure("tagma")
    assert sample.counters["native_bytes"] > 10 * sample.counters["python_bytes"]
    assert sample.value <= 96


@pytest.mark.slow
def test_scheduler_steps_of_both(tmp_path: Path) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from vllm_tagma.lab.bench.tiny_model import write_tiny_model
    from vllm_tagma.manager import TagmaKVCacheManager

    write_tiny_model(tmp_path)
    for variant, kind in (("tagma", TagmaKVCacheManager), ("vllm", KVCacheManager)):
        built = bench_scheduler.build_scheduler(variant, tmp_path, running=4)
        assert type(built.kv_cache_manager) is kind
        driver = bench_scheduler._Engine(built, running=4)
        assert driver.measure(3).value > 0
        assert len(built.running) == 4
        assert {r.num_output_tokens for r in built.running} == {5}
        # Near the model's length the batch is replaced, and has the size it had.
        driver._refill()
        assert len(built.running) == 4
        assert driver.generation == 1


def test_an_engine_that_fails_says_why() -> None:
    code = "import sys; print('starting'); sys.exit('no such backend')"
    with pytest.raises(
        bench_engine.EngineRunError, match=r"status 1 .*\nstarting\nno such backend"
    ):
        bench_engine.run_child([sys.executable, "-c", code], cpus=[])


def test_an_engine_answers_in_one_line() -> None:
    code = (
        "import os\nfrom vllm_tagma.lab.bench.bench_engine import answer\nprint('noise')\n"
        "assert os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] == '0'\nprint(answer([1.5, 2.0]))"
    )
    assert bench_engine.run_child([sys.executable, "-c", code], cpus=[]) == [1.5, 2.0]


def test_selection() -> None:
    planned = bench_manager.manager_scenarios(TINY)
    assert [p.name for p in bench_plan.selected(planned, ["hit/1k"])] == ["manager/lookup_hit/1k"]
    assert bench_plan.selected(planned, []) == planned
    with pytest.raises(ValueError, match=r"no scenario matches 'nix'\. There are: manager/decode"):
        bench_plan.selected(planned, ["nix"])


def test_the_quick_run_names_what_it_leaves_out() -> None:
    planned = bench_engine.engine_scenarios(TINY, cpus=[])
    measured, skipped = bench_plan.run(planned, effort=TINY)
    assert measured == []
    assert skipped == {"engine/tokens_per_second/256": "not part of --quick"}
