"""What ``docs/kernel-code.md`` claims of compiled attention. Static findings, and no GPU needed.

In a process of its own: elsewhere Triton may be interpreted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

_CODE = """
import dataclasses, json, sys
from vllm_tagma.lab.kernel_code import assembly, specs
found = []
vllms = [spec for spec in specs.vllm_specs() if spec.name == "attention, decode"]
join = [spec for spec in specs.write_specs() if "joining" in spec.name]
for spec in (*specs.range_specs(), *specs.baseline_specs(), *join, *vllms):
    for target in assembly.TARGETS:
        if target.name != "sm_90" and (spec.vllms or spec.name != "attention, decode"):
            continue  # a compilation costs two seconds; the page has all
        code = assembly.compiled(spec, target)
        found.append({"spec": spec.name, "vllms": spec.vllms, "target": target.name,
                      **dataclasses.asdict(code), "loops": [l._asdict() for l in code.loops]})
json.dump(found, sys.stdout)
"""


@cache
def compiled() -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def ours_of(name: str) -> list[dict[str, Any]]:
    return [code for code in compiled() if not code["vllms"] and code["spec"].startswith(name)]


def attention_loops(code: dict[str, Any]) -> list[dict[str, int]]:
    return [loop for loop in code["loops"] if loop["products"]]


def test_attention_compiles_for_each_gpu() -> None:
    ours = ours_of("attention")
    assert {code["target"] for code in ours} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert len({code["spec"] for code in ours if code["target"] == "sm_90"}) == 4


def test_no_loop_over_the_keys_of_a_range_loads_from_a_table() -> None:
    """Neither in a row of one range nor inside one of several ranges."""
    for code in ours_of("attention"):
        if "joining" in code["spec"]:
            continue
        loops = attention_loops(code)
        assert {loop["depth"] for loop in loops} == {0, 1}, "one range, and several"
        for loop in loops:
            assert loop["wide"] > 0, "the loads of keys and values must be found"
            assert loop["narrow"] == 0, f"{code['spec']} on {code['target']}"


def test_vllms_loop_loads_from_a_table() -> None:
    """So the assembler is read rightly, and the difference is there."""
    (code,) = [code for code in compiled() if code["vllms"]]
    assert attention_loops(code)
    assert all(loop["narrow"] > 0 and loop["wide"] > 0 for loop in attention_loops(code))


def test_the_gpu_checks_baseline_differs_in_its_table_loads() -> None:
    """What one costs more than the other is the cost of the loads, which the check reports."""
    ((table,), (none,)) = (attention_loops(code) for code in ours_of("baseline"))
    assert (table["narrow"] > 0, none["narrow"]) == (True, 0)
    assert (table["wide"], table["products"]) == (none["wide"], none["products"])


def test_nothing_spills() -> None:
    spilled = {
        f"{code['spec']} on {code['target']}": code["spills"]
        for code in compiled()
        if code["spills"] and not code["vllms"]
    }
    assert spilled == {}
