"""A tiny model on disk and finished vLLM configurations for it: no engine, no weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_tagma.config import ENVIRONMENT_NAMES

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

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
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
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
