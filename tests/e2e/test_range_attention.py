"""Tokens of a model whose attention reads range tables equal those of vLLM's Triton attention.

Through Model Runner V2 under Triton's interpreter, in one process (``attention_engine_run.py``):
a prompt in chunks, shared prefixes, preemption, aborts, and rows that are relocated before each
step. One layer and few tokens, since each kernel is interpreted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
from config_case import Case, Reports, settings_of
from engine_process import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent

_ENGINE = {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 4}
_WORKLOAD = {"prefix": 39, "long": 60, "output": 4, "pressure": 3, "stutter": False}


def cases(folder: Path) -> dict[str, Case]:
    """The pool holds fewer requests than run, once each needs its fifth block."""
    model = folder / "full"
    model.mkdir()
    return {
        "full": Case(
            model=tiny_models.one_layer_llama(model),
            engine={**_ENGINE, "num_gpu_blocks_override": 11, "max_model_len": 128},
            workload=_WORKLOAD,
            tagma={"v2_interpreter": True},
        )
    }


@pytest.fixture(scope="module")
def reports(
    engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Reports]:
    """What each backend saw, by case."""
    folder = tmp_path_factory.mktemp("range_attention")
    settings, out = folder / "settings.json", folder / "reports.json"
    written = {
        name: {backend: settings_of(case, backend) for backend in ("paged", "tagma")}
        for name, case in cases(folder).items()
    }
    settings.write_text(json.dumps(written))
    environment = {
        **engine_environment,
        "PYTHONPATH": str(HERE.parent / "triton_interpreter"),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    run = run_script("attention_engine_run.py", settings, out, environment=environment, timeout=800)
    assert run.returncode == 0, f"an engine failed:\n{run.stdout[-6000:]}"
    found: dict[str, Reports] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("case", ["full"])
def test_tokens_equal_those_of_vllms_triton_attention(
    reports: dict[str, Reports], case: str
) -> None:
    paged, tagma = (reports[case][name] for name in ("paged", "tagma"))
    assert tagma["requests"].keys() == paged["requests"].keys()
    for name, stock in paged["requests"].items():
        for key in ("tokens", "finish"):
            assert tagma["requests"][name][key] == stock[key], name
    assert len({str(request["tokens"]) for request in paged["requests"].values()}) >= 5
    for seen in (paged, tagma):
        assert seen["preemptions"] > 0
        assert seen["chunked_steps"] > 0
        assert any(request["cached"] for request in seen["requests"].values())
        assert seen["usage_after_drain"] == 0.0
    assert (paged["attention"], tagma["attention"]) == (["TRITON_ATTN"], ["CUSTOM"])
    assert paged["table"] > 0
    assert tagma["table"] == 0, "no block table is expanded for attention that reads ranges"
    assert tagma["ranges"] > 2, "rows of several ranges must be read"
