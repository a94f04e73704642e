"""``LLM(kv_cache_backend="tagma")`` and the same keyword on vLLM's argument classes."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

import vllm_tagma  # noqa: F401  - wires EngineArgs
from vllm_tagma.errors import ConfigError, UnsupportedError

BOTH = pytest.mark.parametrize("owner", [EngineArgs, AsyncEngineArgs])


@BOTH
def test_the_keyword_becomes_an_entry(owner: Any, tiny_model: Path) -> None:
    given = {"a": 1}
    args = owner(model=str(tiny_model), kv_cache_backend="tagma", additional_config=given)
    assert args.additional_config == {"a": 1, "kv_cache_backend": "tagma"}
    assert given == {"a": 1}


@BOTH
def test_nothing_is_stored_on_the_instance(owner: Any, tiny_model: Path) -> None:
    args = owner(model=str(tiny_model), kv_cache_backend="tagma")
    assert set(vars(args)) == set(vars(owner(model=str(tiny_model))))
    again = owner(**vars(args))  # what LLM.from_engine_args does
    assert again.additional_config == {"kv_cache_backend": "tagma"}
    replaced = dataclasses.replace(args, seed=7)
    assert replaced.additional_config == {"kv_cache_backend": "tagma"}


@BOTH
def test_the_signature_is_vllms_own(owner: Any) -> None:
    assert "kv_cache_backend" not in inspect.signature(owner.__init__).parameters
    assert "additional_config" in inspect.signature(owner.__init__).parameters


@BOTH
def test_mistakes_are_errors(owner: Any, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="Choices: paged, tagma"):
        owner(model=str(tiny_model), kv_cache_backend="tagm")
    with pytest.raises(ConfigError, match="contradicts"):
        owner(
            model=str(tiny_model),
            kv_cache_backend="tagma",
            additional_config={"kv_cache_backend": "paged"},
        )
    with pytest.raises(TypeError, match="kv_cache_backends"):
        owner(model=str(tiny_model), kv_cache_backends="tagma")


def test_no_backend_leaves_the_argument_as_it_was(tiny_model: Path) -> None:
    assert EngineArgs(model=str(tiny_model), kv_cache_backend=None).additional_config == {}


def test_llm_passes_the_keyword_on(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def stop(engine_args: Any, **_: Any) -> None:
        raise Reached(engine_args.additional_config)

    monkeypatch.setattr(LLMEngine, "from_engine_args", stop)
    with pytest.raises(Reached) as reached:
        LLM(str(tiny_model), load_format="dummy", kv_cache_backend="tagma")
    assert reached.value.args == ({"kv_cache_backend": "tagma"},)


def test_wrong_options_stop_llm_before_an_engine_starts(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'copy_budget'.*=-1 must be 0 to 65536 blocks a step"):
        LLM(
            str(tiny_model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=256,
            additional_config={"kv_cache_backend": "tagma", "tagma": {"copy_budget": -1}},
        )


def test_llm_shows_a_refusal_before_an_engine_starts(tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"--kv-offloading-size is 1\.0"):
        LLM(
            str(tiny_model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=256,
            kv_offloading_size=1.0,
            kv_cache_backend="tagma",
        )
