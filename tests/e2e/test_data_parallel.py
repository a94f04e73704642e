"""Two engines behind one front end: each with a pool of its own, and with figures of its own.

The same prompts on stock and on tagma (engines_run.py) have to give the same tokens and the same
prefix hits, which an engine finds in its own pool only.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_process import run_script
from engines_run import BLOCK_SIZE, POOL_BLOCKS, SHARED_BLOCKS
from seeded_model import write_seeded_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

Report = dict[str, Any]


@pytest.fixture(scope="module")
def report(engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("engines")
    write_seeded_model(folder)
    out = folder / "report.json"
    run = run_script("engines_run.py", folder, out, environment=engine_environment, timeout=800)
    assert run.returncode == 0, f"the engines failed:\n{run.stdout[-6000:]}"
    found: Report = json.loads(out.read_text())
    found["log"] = run.stdout
    return found


def test_tokens_and_hits_are_identical(report: Report) -> None:
    assert report["tagma"]["answers"] == report["paged"]["answers"]
    assert report["log"].count("KV-cache backend tagma") == 2


def test_an_engine_hits_its_own_pool_only(report: Report) -> None:
    hits = {name: cached for name, (_, cached) in report["tagma"]["answers"].items()}
    assert hits["first on 0"] == hits["first on 1"] == 0
    assert set(hits.values()) == {0, SHARED_BLOCKS * BLOCK_SIZE}


def test_metrics_tell_the_engines_apart(report: Report) -> None:
    assert report["paged"]["engines"] == [{}, {}]
    for engine, requests in zip(report["tagma"]["engines"], (6, 8), strict=True):
        assert engine["request_ranges_count"] == requests
        assert engine["requests"] == engine["pool_blocks.live"] == 0
        assert engine["pool_blocks.cached"] >= SHARED_BLOCKS
        states = [engine[f"pool_blocks.{state}"] for state in ("live", "cached", "hole")]
        assert sum(states) == POOL_BLOCKS - 1, "vLLM's null block is in no state"
