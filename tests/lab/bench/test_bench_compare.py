"""``--compare``: what counts as moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tagma.lab.bench.bench_compare import compare
from vllm_tagma.lab.bench.schema import Variant

if TYPE_CHECKING:
    from conftest import Make


def _verdicts(make_result: Make, old: float, new: float) -> dict[str, str]:
    return {c.name: c.verdict for c in compare(make_result(old), make_result(new)).changes}


def test_a_better_ratio_is_better(make_result: Make) -> None:
    verdicts = _verdicts(make_result, 10.0, 12.0)
    assert verdicts["manager/decode_allocate/512"] == "better"
    assert verdicts["kv_coord_map/single_offset"] == "same"


def test_a_worse_ratio_is_worse(make_result: Make) -> None:
    assert _verdicts(make_result, 12.0, 10.0)["scheduler/step/512"] == "worse"


def test_a_small_change_is_the_same(make_result: Make) -> None:
    assert _verdicts(make_result, 10.0, 10.2)["scheduler/step/512"] == "same"


def test_bands_that_touch_are_the_same(make_result: Make) -> None:
    old, new = make_result(), make_result()
    # Medians differ by 40 %, the rounds of both runs overlap.
    for result, rounds in ((old, [1.0, 1.4]), (new, [1.2, 2.16])):
        result.scenarios[0].variants["tagma"] = Variant(rounds=rounds)
    (change,) = (c for c in compare(old, new).changes if c.name == "kv_coord_map/single_offset")
    assert change.verdict == "same"
    assert round(change.factor, 6) == 1.4


def test_times_without_baseline_are_compared_directly(make_result: Make) -> None:
    old, new = make_result(), make_result()
    new.scenarios[0].variants["tagma"] = Variant(rounds=[20.0, 22.0])
    (change,) = (c for c in compare(old, new).changes if c.name == "kv_coord_map/single_offset")
    assert (change.measure, change.old, change.new, change.verdict) == (
        "ns/call",
        3.0,
        21.0,
        "worse",
    )


def test_scenarios_of_one_run_and_the_environment_are_listed(make_result: Make) -> None:
    old, new = make_result(), make_result()
    del old.scenarios[0]
    del new.scenarios[1]
    new.environment["versions"]["vllm"] = "0.33.0"
    new.environment["machine"]["load_average"] = [9.0, 9.0, 9.0]
    comparison = compare(old, new)
    assert comparison.only_new == ["kv_coord_map/single_offset"]
    assert comparison.only_old == ["kv_slot_mapping/prefill_4k"]
    assert comparison.environment == [("versions.vllm", "0.32.0", "0.33.0")]
