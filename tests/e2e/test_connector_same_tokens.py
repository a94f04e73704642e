"""Prompts saved by one engine and loaded by another, on both backends crosswise: the same tokens.

What stock saves our engine loads, and the reverse, through vLLM's file-based ``ExampleConnector``
alone and inside a ``MultiConnector``, while our rows move in every step. The KV of each prompt is
compared bit for bit.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_process import run_script

from vllm_tagma.lab.bench.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

Report = dict[str, Any]
MANAGERS = {"paged": "KVCacheManager", "tagma": "TagmaKVCacheManager"}
RUNS = (("paged", "save"), ("tagma", "save"), ("paged", "load"), ("tagma", "load"))


@pytest.fixture(scope="module")
def reports(
    engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Report]:
    """What each engine saw; an engine that loads finds what the other backend saved."""
    folder = tmp_path_factory.mktemp("connectors")
    write_tiny_model(folder)
    found: dict[tuple[str, str], Report] = {}
    for backend, mode in RUNS:
        out = folder / f"{backend}-{mode}.json"
        saved_by_paged = (backend == "paged") == (mode == "save")
        store = folder / ("by-paged" if saved_by_paged else "by-tagma")
        arguments = (backend, folder, out, mode, store)
        run = run_script(
            "connector_engine_run.py", *arguments, environment=engine_environment, timeout=300
        )
        assert run.returncode == 0, f"{backend} engine failed to {mode}:\n{run.stdout[-6000:]}"
        found[backend, mode] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(("backend", "mode"), RUNS)
def test_tokens_and_kv_are_identical(
    reports: dict[tuple[str, str], Report], backend: str, mode: str
) -> None:
    reference, report = reports["paged", "save"], reports[backend, mode]
    assert report["outputs"] == reference["outputs"]
    assert report["digests"] == reference["digests"]
    assert len(report["digests"]) == len(report["outputs"]) == 12
    assert len(set(report["digests"].values())) == 12


@pytest.mark.parametrize(("backend", "mode"), RUNS)
def test_each_engine_did_what_it_was_made_for(
    reports: dict[tuple[str, str], Report], backend: str, mode: str
) -> None:
    report = reports[backend, mode]
    assert report["manager"] == MANAGERS[backend]
    assert report["connector"] == {"save": "ExampleConnector", "load": "MultiConnector"}[mode]
    assert (report["steps_that_load"] >= 4) == (mode == "load")
    assert (report["copies"] > 50) == (backend == "tagma")
    assert report["usage"] == 0.0
    assert report["reset"] is True
