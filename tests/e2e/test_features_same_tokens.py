"""Features of vLLM's engine on both backends: the same answers, the same hits, the same schedule.

Asynchronous scheduling (forced, since the CPU platform turns it off), KV-cache data types, pooling
models, several sampled answers, beam search, prompt logprobs, streamed input, and resets of the
prefix cache while requests run. On tagma rows are relocated before each step. One process serves
all engines (``feature_engine_run.py``).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_process import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
Reports = dict[str, dict[str, dict[str, Any]]]

ASKED = {
    "sync": ("Samples", "Beams", "Sessions", "Resets"),
    "async": ("Workload", "Samples", "Sessions", "Resets"),
    "float16": ("Workload",),
    "fp8_e4m3": ("Workload",),
    "fp8_e5m2": ("Workload",),
    "embed": ("Pooling",),
    "token_embed": ("TokenPooling",),
    "classify": ("Classes",),
    "events": ("Events",),
}


def run_features(
    model: Path, out: Path, environment: dict[str, str], names: list[str]
) -> subprocess.CompletedProcess[str]:
    return run_script(
        "feature_engine_run.py", model, out, *names, environment=environment, timeout=800
    )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features") / "model"
    folder.mkdir()
    return tiny_models.add_tokenizer(tiny_models.full_llama(folder))


@pytest.fixture(scope="module")
def v2_reports(tiny_model: Path, engine_environment: dict[str, str]) -> Reports:
    """The same on Model Runner V2, under Triton's interpreter."""
    environment = {
        **engine_environment,
        "PYTHONPATH": str(HERE.parent / "triton_interpreter"),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    out = tiny_model.with_name("v2-reports.json")
    run = run_features(tiny_model, out, environment, ["async_v2"])
    assert run.returncode == 0, f"an engine failed:\n{run.stdout[-6000:]}"
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reports(tiny_model: Path, engine_environment: dict[str, str]) -> Reports:
    """What each backend saw, by engine and backend."""
    out = tiny_model.with_name("reports.json")
    run = run_features(tiny_model, out, engine_environment, list(ASKED))
    assert run.returncode == 0, f"an engine failed:\n{run.stdout[-6000:]}"
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("engine", "feature"),
    [(engine, name) for engine in ASKED for name in ASKED[engine] if engine != "events"],
)
def test_both_backends_do_the_same(reports: Reports, engine: str, feature: str) -> None:
    stock, ours = (reports[engine][backend] for backend in ("paged", "tagma"))
    for name, seen in stock[feature].items():
        assert ours[feature][name] == seen, f"{name} of {feature}, {engine}"
    assert ours[feature].keys() == stock[feature].keys()
    assert ours[feature]["usage"] == 0.0
    assert ours[feature]["reset"] is True
    classes = ("TagmaAsyncScheduler",) if engine == "async" else ("TagmaScheduler",)
    assert ours["scheduler"] in classes


def test_asynchronous_v2_does_the_same(v2_reports: Reports) -> None:
    stock, ours = (v2_reports["async_v2"][backend] for backend in ("paged", "tagma"))
    assert ours["Short"] == stock["Short"]
    assert len(stock["Short"]["short-0"]["tokens"][0]) == 16
    assert stock["Short"]["preemptions"] > 0
    assert (stock["scheduler"], ours["scheduler"]) == ("AsyncScheduler", "TagmaAsyncScheduler")
    assert ours["copies"] > 20
    assert ours["slot_audits"][0]["padded"] == 0


def test_features_did_what_they_claim(reports: Reports) -> None:
    """In the tagma runs, whose equals the stock ones are."""
    sync, late = reports["sync"]["tagma"], reports["async"]["tagma"]
    samples = [seen for name, seen in sync["Samples"].items() if name.startswith("sample-")]
    assert all(len({str(tokens) for tokens in one["tokens"]}) == 3 for one in samples)
    assert sum(one["prompt_logprobs"] is not None for one in samples) == 2
    assert sync["Samples"]["preemptions"] > 0
    for run in (sync, late):
        sessions = [run["Sessions"][f"session{delay}"] for delay in (-1, 0, 6)]
        assert [len(one["tokens"]) for one in sessions] == [30, 30, 30]
        resets = [seen for name, seen in run["Resets"].items() if name.startswith("reset-at-")]
        assert len(resets) == 4
        assert all(done and usage == 0.0 for _, done, usage in resets)
        assert sum(running for running, _, _ in resets) >= 12
        assert run["Resets"]["refused-while-running"] is False
    for engine in ("async", "float16", "fp8_e4m3", "fp8_e5m2"):
        seen = reports[engine]["tagma"]["Workload"]
        assert seen["preemptions"] > 0
        assert sum(bool(one["cached"]) for one in seen.values() if isinstance(one, dict)) >= 4
    assert any(one["cached"] for one in _vectors(reports["embed"]["tagma"]["Pooling"]))


def test_data_types_of_the_cache_differ(reports: Reports) -> None:
    """Otherwise the engine would have ignored the option."""
    answers = {
        engine: str([one for one in seen.values() if isinstance(one, dict)])
        for engine in ("float16", "fp8_e4m3", "fp8_e5m2")
        for seen in [reports[engine]["paged"]["Workload"]]
    }
    assert len(set(answers.values())) == 3


def test_rows_moved_and_slots_were_compared(reports: Reports) -> None:
    for engine, seen in reports.items():
        assert seen["tagma"]["copies"] > 20, engine
        assert seen["tagma"]["rows"] > 10, engine
        (audit,) = seen["tagma"]["slot_audits"]
        assert audit["slots"] > 1_000, engine
        assert audit["padded"] == 0, engine


def test_a_subscriber_replays_to_what_the_pool_holds(reports: Reports) -> None:
    seen = reports["events"]["tagma"]["Events"]
    told, pool = seen["subscriber"], seen["pool"]
    assert sorted(told["resident"]) == sorted(pool["hashes"])
    assert sum(told["resident"].values()) == pool["cached_blocks"] > 0
    assert told["kinds"]["BlockStored"] > 10
    assert told["kinds"]["BlockRemoved"] > 0
    assert told["kinds"]["AllBlocksCleared"] > 0
    assert set(told["ever"]) > set(told["resident"])


def _vectors(seen: dict[str, Any]) -> list[Any]:
    return [one for one in seen.values() if isinstance(one, dict)]
