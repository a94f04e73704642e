"""Speculative decoding by method: the tokens, hits and accepted drafts of stock on both backends.

All methods draft for one target, so each method's tokens can also be held against decoding without
drafts. Each method runs on both backends, twice over the workload of
``config_engine_run.py``; the second time rows are relocated before each step, those that hold
blocks for drafts included. What must be equal is in ``config_case.require_equal``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from config_case import Case, Reports, require_equal, run_cases, selected

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

DRAFTS = 3
Speculation = dict[str, Any]


class Models:
    """Models and heads, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, write: Callable[[Path], Path]) -> str:
        folder = self._folder / name
        if not folder.is_dir():
            folder.mkdir()
            write(folder)
        return str(folder)

    @property
    def target(self) -> Path:
        return Path(self("target", tiny_models.spec_target))


def _ngram(models: Models) -> Speculation:
    return {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def _draft(models: Models) -> Speculation:
    return {"method": "draft_model", "model": models("draft", tiny_models.draft_llama)}


def _draft_self(models: Models) -> Speculation:
    return {"method": "draft_model", "model": str(models.target)}


def _eagle(models: Models) -> Speculation:
    head = models("eagle", lambda folder: tiny_models.eagle_head(folder, models.target))
    return {"method": "eagle", "model": head}


def _medusa(models: Models) -> Speculation:
    head = models("medusa", lambda folder: tiny_models.medusa_head(folder, models.target))
    return {"method": "medusa", "model": head, "num_speculative_tokens": 2}


METHODS: dict[str, Callable[[Models], Speculation]] = {
    "ngram": _ngram,
    "draft-model": _draft,
    "draft-model-alike": _draft_self,
    "eagle": _eagle,
    "medusa": _medusa,
}


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest,
    engine_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Reports]:
    """The reports of the methods that were asked for, and of decoding without drafts."""
    folder = tmp_path_factory.mktemp("speculation")
    models = Models(folder)
    cases = {"none": Case(model=models.target, moves=False)}
    for method in selected(request, "method"):
        drafts = {"num_speculative_tokens": DRAFTS, **METHODS[method](models)}
        cases[method] = Case(model=models.target, engine={"speculative_config": drafts})
    # vLLM cannot start an engine in a process that has imported numba, as n-grams do: they go last.
    last = {name: cases.pop(name) for name in ("ngram",) if name in cases}
    return run_cases(cases | last, folder, engine_environment)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_hits_and_drafts_are_stocks(method: str, reports: dict[str, Reports]) -> None:
    require_equal(reports[method])
    for name in ("rest", "moving"):
        spec = reports[method]["tagma"][name]["spec"]
        accepted, drafted = spec["accepted_tokens"], spec["draft_tokens"]
        if method == "draft-model-alike":  # the model drafts for itself and agrees
            assert 0 < accepted == drafted
        else:
            assert 0 < accepted < drafted


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token(method: str, reports: dict[str, Reports]) -> None:
    """Stock decoding without drafts gives the same tokens."""
    plain = reports["none"]["paged"]["rest"]["requests"]
    found = reports[method]["tagma"]["rest"]["requests"]
    assert {name: request["tokens"] for name, request in found.items()} == {
        name: request["tokens"] for name, request in plain.items()
    }
