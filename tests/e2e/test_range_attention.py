"""Tokens of a model whose attention reads range tables equal those of vLLM's Triton attention.

Through Model Runner V2 under Triton's interpreter, in one process (``attention_engine_run.py``):
prompts in chunks, shared prefixes, preemption, aborts, and a second pass in which rows are
relocated before each step, so that they have many ranges.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import tiny_models
from config_case import HERE, Case, Reports, require_equal, settings_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

_ENGINE = {"block_size": 16, "num_gpu_blocks_override": 14, "max_model_len": 128}
_WORKLOAD = {"prefix": 36, "long": 70, "output": 10, "pressure": 5}
_BUDGET = {"max_num_batched_tokens": 48, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def reports(
    engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    folder = tmp_path_factory.mktemp("range_attention")
    model = folder / "model"
    model.mkdir()
    case = Case(
        model=tiny_models.full_llama(model),
        engine={**_ENGINE, **_BUDGET},
        workload=_WORKLOAD,
        tagma={"v2_interpreter": True},
    )
    settings, out = folder / "settings.json", folder / "reports.json"
    settings.write_text(json.dumps(settings_of(case)))
    run = subprocess.run(
        [sys.executable, str(HERE / "attention_engine_run.py"), str(settings), str(out)],
        env={
            **engine_environment,
            "PYTHONPATH": str(HERE.parent / "triton_interpreter"),
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 0, f"an engine failed:\n{run.stdout[-6000:]}"
    found: Reports = json.loads(out.read_text())
    return found


def test_tokens_equal_those_of_vllms_triton_attention(reports: Reports) -> None:
    require_equal(reports)


def test_each_read_what_it_says(reports: Reports) -> None:
    paged, tagma = (dict[str, Any](reports[name]) for name in ("paged", "tagma"))
    assert (paged["attention"], tagma["attention"]) == ("TRITON_ATTN", "CUSTOM")
    assert paged["table"] > 0
    assert tagma["table"] == 0, "no block table is expanded for attention that reads ranges"
    assert tagma["ranges"] > 2, "rows of several ranges must be read"
