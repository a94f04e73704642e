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
    return _configs(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def speculating_configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """The same by method of speculative decoding."""
    return {
        method: _configs(tmp_path_factory.mktemp(method), speculation=method)
        for method in ("ngram", "draft_model", "eagle")
    }


def _configs(folder: Path, **options: str) -> dict[str, object]:
    from built_schedulers import engine_config

    with pytest.MonkeyPatch.context() as patch:
        # It tells test_vllm_033 where the sources lie; the backend refuses names it does not know.
        patch.delenv("TAGMA_VLLM033", raising=False)
        return {
            f"{name}_config": engine_config(folder, backend, **options)
            for name, backend in (("stock", "paged"), ("tagma", "tagma"))
        }


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAGMA_VLLM033", raising=False)
