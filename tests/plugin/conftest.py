"""A tiny model on disk and finished vLLM configurations for it: no engine, no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_tagma.config import ENVIRONMENT_NAMES
from vllm_tagma.lab.bench.tiny_model import write_tiny_model

ConfigFactory = Callable[..., Any]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """None of our switches set; and what vLLM sets while it builds a configuration is undone."""
    before = dict(os.environ)
    for name in ENVIRONMENT_NAMES:
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a two-layer Llama and nothing else."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_model(folder, max_position_embeddings=1024)
    return folder


@pytest.fixture
def engine_args(tiny_model: Path) -> ConfigFactory:
    """``EngineArgs`` for the tiny model, with changes."""
    from vllm.engine.arg_utils import EngineArgs

    import vllm_tagma  # noqa: F401  - wires EngineArgs

    def make(**changes: Any) -> Any:
        base = {
            "model": str(tiny_model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "block_size": 32,
        }
        return EngineArgs(**{**base, **changes})

    return make


@pytest.fixture
def vllm_config(engine_args: ConfigFactory) -> ConfigFactory:
    """A finished ``VllmConfig`` of the tiny model, paged unless told otherwise."""
    return lambda **changes: engine_args(**changes).create_engine_config()
