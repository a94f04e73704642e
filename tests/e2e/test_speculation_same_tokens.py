"""Speculative decoding by method: the tokens, hits and accepted drafts of stock on both backends.

All methods but one draft for one target, so their tokens can also be held against decoding without
drafts. Each runs over the workload of ``config_engine_run.py``, on our backend a second time with
rows that are relocated before each step, those that hold blocks for drafts included. What must be
equal is in ``config_case.require_equal``.
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
    draft = models("draft", lambda folder: tiny_models.draft_llama(folder, models.target))
    return {"method": "draft_model", "model": draft}


def _eagle(models: Models) -> Speculation:
    head = models("eagle", lambda folder: tiny_models.eagle_head(folder, models.target))
    return {"method": "eagle", "model": head}


def _eagle3(models: Models) -> Speculation:
    head = models("eagle3", lambda folder: tiny_models.eagle3_head(folder, models.target))
    return {"method": "eagle3", "model": head}


def _medusa(models: Models) -> Speculation:
    head = models("medusa", lambda folder: tiny_models.medusa_head(folder, models.target))
    return {"method": "medusa", "model": head, "num_speculative_tokens": 2}


METHODS: dict[str, Callable[[Models], Speculation]] = {
    "ngram": _ngram,
    "draft-model": _draft,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mtp": lambda models: {"method": "mtp"},
}
# In this workload a relocated row would take the place of a cached block that a preempted request
# hits when it comes back (block_shuffle.py).
SPARE_CACHED = {"eagle3", "mtp"}


def _case(method: str, models: Models) -> Case:
    drafts = {"num_speculative_tokens": DRAFTS, **METHODS[method](models)}
    target = models.target
    if method == "mtp":  # its head is part of the target
        target = Path(models("mtp", tiny_models.mtp_glm))
    return Case(
        model=target,
        engine={"speculative_config": drafts},
        workload={"spares_cached": method in SPARE_CACHED},
    )


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest,
    engine_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Reports]:
    """The reports of the methods that were asked for, and of stock without drafts."""
    folder = tmp_path_factory.mktemp("speculation")
    models = Models(folder)
    cases = {"none": Case(model=models.target, backends=("paged",))}
    for method in selected(request, "method"):
        cases[method] = _case(method, models)
    return run_cases(cases, folder, engine_environment)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_hits_and_drafts_are_stocks(method: str, reports: dict[str, Reports]) -> None:
    require_equal(reports[method])
    for name in ("rest", "moving"):
        spec = reports[method]["tagma"][name]["spec"]
        assert 0 < spec["accepted_tokens"] < spec["draft_tokens"]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "mtp"])
def test_drafts_change_no_token(method: str, reports: dict[str, Reports]) -> None:
    """Stock decoding without drafts gives the same tokens."""
    plain = reports["none"]["paged"]["rest"]["requests"]
    found = reports[method]["tagma"]["rest"]["requests"]
    assert {name: request["tokens"] for name, request in found.items()} == {
        name: request["tokens"] for name, request in plain.items()
    }
