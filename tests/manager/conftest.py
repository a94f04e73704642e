"""Makes the helpers of this folder and of ``differential`` importable from the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "differential"))
pytest.register_assert_rewrite("kv_worker", "manager_pair", "manager_solo", "scheduler_trace")


@pytest.fixture(scope="session")
def engine_configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """vLLM's configuration for each backend; the model is never loaded."""
    from scheduler_trace import engine_config

    folder = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        # It tells test_vllm_033 where the sources lie; the backend refuses names it does not know.
        patch.delenv("TAGMA_VLLM033", raising=False)
        return {
            "stock_config": engine_config(folder, "paged"),
            "tagma_config": engine_config(folder, "tagma"),
        }


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAGMA_VLLM033", raising=False)
