"""Configurations that leave the cache's blocks alone: a tiny model on both backends, equal in all.

Each case runs on both backends, twice over the workload of ``config_engine_run.py``; the second
time rows are relocated before each step. What must be equal is in ``config_case.require_equal``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from config_case import Case, Reports, require_equal, run_cases, selected

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


def _changed(**changes: Any) -> Callable[[Path], Case]:
    """``full_llama`` with changes to the case."""

    def case(folder: Path) -> Case:
        return Case(model=tiny_models.full_llama(folder), **changes)

    return case


def _lora(folder: Path, **engine: Any) -> Case:
    adapters = [["", ""]]
    for name in ("red", "yellow"):
        (folder / name).mkdir()
        adapters.append([name, str(tiny_models.lora_adapter(folder / name, name))])
    return Case(
        model=tiny_models.full_llama(folder),
        engine={"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, **engine},
        workload={"adapters": adapters},
    )


def _structured(folder: Path) -> Case:
    return Case(
        model=tiny_models.add_tokenizer(tiny_models.full_llama(folder)),
        engine={"skip_tokenizer_init": False, "num_gpu_blocks_override": 64},
        workload={"structured_outputs": {"regex": "(w[3-7][0-9]){30}"}},
    )


CASES: dict[str, Callable[[Path], Case]] = {
    "default": _changed(),
    "no-prefix-caching": _changed(engine={"enable_prefix_caching": False}),
    "sha256-cbor": _changed(engine={"prefix_caching_hash_algo": "sha256_cbor"}),
    "no-chunked-prefill": _changed(
        engine={"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        workload={"stutter": False},
    ),
    "priority": _changed(engine={"scheduling_policy": "priority"}, workload={"priorities": True}),
    "watermark": _changed(engine={"watermark": 0.15, "scheduler_reserve_full_isl": False}),
    "lora": _lora,
    "lora-with-room": lambda folder: _lora(folder, num_gpu_blocks_override=96),
    "structured-output": _structured,
    "int8-weights": lambda folder: Case(
        model=tiny_models.int8_llama(folder), engine={"dtype": "bfloat16"}
    ),
}


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest,
    engine_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Reports]:
    """The reports of the cases that were asked for, by name."""
    folder = tmp_path_factory.mktemp("configurations")
    cases = {}
    for name in selected(request, "name"):
        (folder / name).mkdir()
        cases[name] = CASES[name](folder / name)
    return run_cases(cases, folder, engine_environment)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_hits_are_stocks(name: str, reports: dict[str, Reports]) -> None:
    # Grammars are compiled in a thread: when a request is admitted depends on how fast that is.
    compiled = name == "structured-output"
    # Each adapter has cached prefixes of its own, which fill the pool: a row that is relocated then
    # takes the place of cached blocks, which stock would have evicted later. With room for all of
    # them hits have to be equal, moved or not.
    require_equal(
        reports[name],
        caching=name != "no-prefix-caching",
        preempts=not compiled and name != "lora-with-room",
        hits_when_moving=name != "lora",
        same_steps=not compiled,
    )
