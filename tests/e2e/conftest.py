"""The real model, and one run of each backend over the same workload, shared by all tests here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_script

from prerequisites import missing

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".model" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model of ``make serve``; ``make test`` converts it before the tests."""
    if not (MODEL / "config.json").exists():
        message = f"{MODEL} is missing: `make test` prepares it"
        missing(message)
    return MODEL


@pytest.fixture(scope="session")
def engine_environment() -> dict[str, str]:
    """One OpenMP thread: on two cores a spinning pair collapses as soon as anything else runs."""
    environment = dict(os.environ)
    environment.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    environment["PYTHONHASHSEED"] = "0"  # vLLM's chains of block hashes begin at it
    return environment


@pytest.fixture(scope="session")
def reports(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each backend saw, by backend name; see engine_run.py."""
    folder = tmp_path_factory.mktemp("same_tokens")
    out: dict[str, dict[str, Any]] = {}
    for backend in ("paged", "tagma"):
        result = folder / f"{backend}.json"
        run = run_script(
            "engine_run.py", backend, model, result, environment=engine_environment, timeout=900
        )
        assert run.returncode == 0, f"{backend} engine failed:\n{run.stdout[-6000:]}"
        out[backend] = json.loads(result.read_text())
        out[backend]["log"] = run.stdout
    return out
