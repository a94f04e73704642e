"""A configuration to compare: what both backends are started with, and what must then be equal.

    reports = run_case(Case(model=folder, engine={"enable_prefix_caching": False}), tmp_path, env)
    require_equal(reports)

``run_cases`` starts one process for each backend (``config_engine_run.py``), whatever the number of
cases; ``require_equal`` says what serving a configuration means.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_script

Reports = dict[str, dict[str, Any]]

_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": 32,  # the CPU attention backend's smallest
    "num_gpu_blocks_override": 16,  # six requests that grow to five blocks or more do not fit
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 384,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
    "disable_log_stats": False,
}
_WORKLOAD: dict[str, Any] = {
    "vocab": 128,
    "seed": 5,
    "prefix": 100,  # tokens that prompts share: three full blocks and a piece
    "long": 300,  # tokens of the prompt that comes in chunks
    "output": 40,
    "pressure": 8,  # requests at once, more than the pool holds
    "stutter": True,  # steps with a budget of a few tokens, in which requests sit out
    "sampling": {},  # changes to greedy sampling
    "structured_outputs": {},
    "adapters": [],  # LoRA adapters by turns: name and path, or an empty path for none
    "priorities": False,
    "spares_cached": False,  # whether relocated rows leave cached blocks alone
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration. ``engine``, ``workload``: changes to the values above. ``tagma``: options
    of our backend beside the checks. ``moves``: a second pass of our backend, in which rows are
    relocated. ``backends``: those that run it."""

    model: Path
    engine: dict[str, Any] = field(default_factory=dict)
    tagma: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    moves: bool = True
    backends: tuple[str, ...] = ("paged", "tagma")
    timeout: int = 60


def run_cases(
    cases: dict[str, Case], folder: Path, environment: dict[str, str]
) -> dict[str, Reports]:
    """What each backend saw, by name of the case and backend. ``environment`` is the processes', to
    which the cases' is added, one for all. Fails with the log if a process did; an engine that
    failed is reported (``require_equal``)."""
    (added,) = {tuple(sorted(case.environment.items())) for case in cases.values()}
    reports: dict[str, Reports] = {name: {} for name in cases}
    for backend in ("paged", "tagma"):
        settings, out = folder / f"{backend}-settings.json", folder / f"{backend}.json"
        written = {
            name: settings_of(case, backend)
            for name, case in cases.items()
            if backend in case.backends
        }
        settings.write_text(json.dumps({"backend": backend, "cases": written}))
        run = run_script(
            "config_engine_run.py",
            settings,
            out,
            environment={**environment, **dict(added)},
            timeout=60 + sum(case.timeout for case in cases.values()),
        )
        assert run.returncode == 0, f"{backend} engines failed:\n{run.stdout[-6000:]}"
        for name, report in json.loads(out.read_text()).items():
            reports[name][backend] = report
            if "error" in report:
                report["log"] = run.stdout
    return reports


def selected(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """The values of a test parameter that this run asks of the module."""
    calls = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(call[parameter] for call in calls if parameter in call))


def run_case(case: Case, folder: Path, environment: dict[str, str]) -> Reports:
    """``run_cases`` of one case."""
    return run_cases({"case": case}, folder, environment)["case"]


def settings_of(case: Case, backend: str) -> dict[str, Any]:
    assert case.workload.keys() <= _WORKLOAD.keys()
    return {
        "engine": {**_ENGINE, "model": str(case.model), **case.engine},
        "tagma": case.tagma,
        "workload": {**_WORKLOAD, **case.workload},
        "moves": case.moves and backend == "tagma",
    }


def require_equal(
    reports: Reports,
    *,
    caching: bool = True,
    preempts: bool = True,
    hits_when_moving: bool = True,
    same_steps: bool = True,
    events: bool = False,
    workers: int = 1,
) -> None:
    """Both backends decided and computed the same, and were not idle. Each of our passes is held
    against stock's one, whose blocks do not move.

    Compared: tokens, finish reasons and cached tokens of each request, steps, preemptions, chunks,
    counts of drafts and accepted drafts, and with ``events`` what entered the prefix cache, as a
    subscriber hears it. ``caching``, ``preempts``: whether hits and preemptions
    are expected. ``hits_when_moving``: False where the pool, full of relocated rows, evicts blocks
    ahead of their turn, as live moves may; then tokens alone are compared in the second pass.
    ``same_steps``: False where the engine steps idly until something else is done, so that their
    number says nothing. ``workers``: how many have compared their slots.
    """
    for backend, report in reports.items():
        log = report.get("log", "")[-6000:]
        assert "error" not in report, f"{backend} engine failed:\n{log}\n{report['error']}"
    paged, tagma = reports["paged"], reports["tagma"]
    assert (paged["manager"], tagma["manager"]) == ("KVCacheManager", "TagmaKVCacheManager")
    stock = paged["rest"]
    for name in ("rest", "moving"):
        if name not in tagma:
            continue
        ours = tagma[name]
        exact = name == "rest" or hits_when_moving
        assert ours["requests"].keys() == stock["requests"].keys()
        for request, theirs in stock["requests"].items():
            for key in ("tokens", "finish") + (("cached",) if exact else ()):
                assert ours["requests"][request][key] == theirs[key], f"{request}, blocks: {name}"
        compared = ("steps", "chunked_steps", "preemptions", "spec", "stored")
        for key in compared if exact and same_steps else ():
            assert ours[key] == stock[key], (
                f"{key}, blocks: {name}: {ours[key]} and stock {stock[key]}"
            )
        assert bool(stock["stored"]) == events
        for seen in (stock, ours):
            assert seen["usage_after_drain"] == 0.0
            assert seen["reset"] is True
        pool = ours["pool"]
        assert pool["rows"] == pool["live_blocks"] == pool["cached_blocks"] == 0
        assert pool["largest_hole_blocks"] == pool["capacity_blocks"]
        assert any(request["cached"] for request in stock["requests"].values()) == caching
        assert len({str(request["tokens"]) for request in stock["requests"].values()}) >= 8
        assert (stock["preemptions"] > 0) == preempts
    if "moving" in tagma:
        assert tagma["moves"]["copies"] > 50, tagma["moves"]
        assert tagma["moves"]["rows"] > 20, tagma["moves"]
    assert len(tagma["slot_audits"]) == workers
    for audit in tagma["slot_audits"]:
        assert audit["batches"] >= (tagma["rest"]["steps"] // 2 if same_steps else 10)
        assert audit["slots"] > 1_000
        assert audit["padded"] == 0
