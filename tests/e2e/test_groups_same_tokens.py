"""Models whose layers differ, or keep something else than keys and values: both backends the same.

Each family is a tiny model, run on both backends twice over the workload of
``config_engine_run.py``; the second time rows are relocated before each step, in every KV-cache
group. What must be equal is in ``config_case.require_equal``; here also what enters the prefix
cache, group by group.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
from config_case import Case, Reports, require_equal, run_cases, selected

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

_EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
_ALONE = {"disable_hybrid_kv_cache_manager": True}
# Without AMX vLLM's kernel takes blocks of 16 tokens, whole prompts and no prefix cache.
_AMX: bool = torch.cpu._is_amx_tile_supported()
_NO_AMX = {"block_size": 16, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 512}


class Family(NamedTuple):
    """A model, the groups that vLLM makes of it, and what it is started with."""

    write: Callable[[Path], Path]
    groups: list[list[Any]]
    engine: dict[str, Any]
    caching: bool = True


_WINDOW, _FULL = "SlidingWindowSpec", "FullAttentionSpec"
_CHUNK = "ChunkedLocalAttentionSpec"
FAMILIES = {
    "latent": Family(
        tiny_models.mla_deepseek,
        [["MLAAttentionSpec", 2]],
        {"dtype": "bfloat16"} if _AMX else _NO_AMX,
        caching=_AMX,
    ),
    "window": Family(tiny_models.window_mistral, [[_WINDOW, 2]], {"num_gpu_blocks_override": 16}),
    "gemma3": Family(
        tiny_models.mixed_gemma3,
        [[_WINDOW, 2], [_WINDOW, 2], [_FULL, 2]],
        {"num_gpu_blocks_override": 40},
    ),
    "gpt-oss": Family(
        tiny_models.mixed_gptoss, [[_WINDOW, 2], [_FULL, 2]], {"num_gpu_blocks_override": 28}
    ),
    "llama4": Family(
        tiny_models.mixed_llama4, [[_CHUNK, 2], [_FULL, 2]], {"num_gpu_blocks_override": 28}
    ),
    "gpt-oss-alone": Family(tiny_models.mixed_gptoss, [[_FULL, 4]], _ALONE),
}


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest,
    engine_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Reports]:
    """The reports of the families that were asked for, by name."""
    folder = tmp_path_factory.mktemp("families")
    cases, models = {}, {}
    for name in selected(request, "name"):
        family = FAMILIES[name]
        if family.write not in models:
            models[family.write] = folder / family.write.__name__
            models[family.write].mkdir()
            family.write(models[family.write])
        cases[name] = Case(
            model=models[family.write],
            engine={**(_EVENTS if family.caching else {}), **family.engine},
            workload={"stutter": family.caching},
        )
    return run_cases(cases, folder, engine_environment)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_hits_and_events_are_stocks(name: str, reports: dict[str, Reports]) -> None:
    family = FAMILIES[name]
    for report in reports[name].values():
        assert report.get("groups", family.groups) == family.groups
    require_equal(reports[name], caching=family.caching, events=family.caching)
