"""Options: every one readable, everything else an error that names the choices."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_tagma.config import TagmaConfig, backend_of, with_backend
from vllm_tagma.errors import ConfigError, TagmaError


@pytest.mark.parametrize(
    ("additional", "backend"),
    [
        (None, "paged"),
        ({}, "paged"),
        ({"other": 1}, "paged"),
        (object(), "paged"),
        ({"kv_cache_backend": "paged"}, "paged"),
        ({"kv_cache_backend": "tagma"}, "tagma"),
        ({"kv_cache_backend": "paged", "tagma": {"alignment": 1}}, "paged"),
    ],
)
def test_backend_is_read(additional: object, backend: str) -> None:
    assert backend_of(additional) == backend


@pytest.mark.parametrize("value", ["Tagma", "", None, True, 1, ["tagma"]])
def test_an_unknown_backend_names_the_choices(value: object) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_backend=.*Choices: paged, tagma") as error:
        backend_of({"kv_cache_backend": value})
    assert repr(value) in str(error.value)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, TagmaError)


def test_options_without_a_backend_are_not_silently_ignored() -> None:
    with pytest.raises(ConfigError, match=r"no 'kv_cache_backend'.*--kv-cache-backend tagma"):
        backend_of({"tagma": {"debug_slots": True}})


def test_defaults() -> None:
    expected = TagmaConfig(alignment=1, debug_slots=False, check_invariants=False)
    assert TagmaConfig.from_sources({"kv_cache_backend": "tagma"}, {}) == expected
    assert TagmaConfig.from_sources(None, {}) == expected


def test_options_are_read() -> None:
    given = {"tagma": {"alignment": 4, "debug_slots": True, "check_invariants": True}}
    assert TagmaConfig.from_sources(given, {}) == TagmaConfig(
        alignment=4, debug_slots=True, check_invariants=True
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aligment": 1}, "unknown option 'aligment'.*alignment, debug_slots, check_invariants"),
        ({"alignment": True}, "'alignment'.*=True must be of type int, not bool"),
        ({"alignment": "4"}, "'alignment'.*='4' must be of type int, not str"),
        ({"alignment": 0}, "'alignment'.*=0 must be at least 1 block"),
        ({"alignment": -3}, "'alignment'.*=-3 must be at least 1 block"),
        ({"debug_slots": 1}, "'debug_slots'.*=1 must be of type bool, not int"),
        ({"check_invariants": None}, "'check_invariants'.*=None must be of type bool"),
        ("debug_slots", "must be a dict of options, not 'debug_slots'"),
        (None, "must be a dict of options, not None"),
    ],
)
def test_wrong_options_are_errors(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TagmaConfig.from_sources({"tagma": options}, {})


@pytest.mark.parametrize("option", ["debug_slots", "check_invariants"])
def test_the_environment_wins_when_set(option: str) -> None:
    name = f"VLLM_TAGMA_{option.upper()}"
    for raw, expected in (("1", True), ("0", False)):
        for given in (True, False):
            config = TagmaConfig.from_sources({"tagma": {option: given}}, {name: raw})
            assert getattr(config, option) is expected


@pytest.mark.parametrize("raw", ["", "true", "yes", "2", " 1", "on"])
@pytest.mark.parametrize("name", ["VLLM_TAGMA_DEBUG_SLOTS", "VLLM_TAGMA_CHECK_INVARIANTS"])
def test_only_0_and_1_are_environment_values(name: str, raw: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* must be 0 or 1"):
        TagmaConfig.from_sources({}, {name: raw})


@pytest.mark.parametrize("name", ["VLLM_TAGMA_DEBUG_SLOT", "VLLM_TAGMA_DEBUGSLOTS"])
def test_a_mistyped_environment_variable_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}, did you mean VLLM_TAGMA_DEBUG_SLOTS"):
        TagmaConfig.from_sources({}, {name: "1"})
    assert TagmaConfig.from_sources({}, {"TAGMA_VLLM033": "folder"}) == TagmaConfig()


def test_with_backend_copies_and_detects_contradictions() -> None:
    given = {"a": 1}
    assert with_backend(given, "tagma") == {"a": 1, "kv_cache_backend": "tagma"}
    assert given == {"a": 1}
    assert with_backend(None, "paged") == {"kv_cache_backend": "paged"}
    same = {"kv_cache_backend": "tagma"}
    assert with_backend(same, "tagma") == same
    with pytest.raises(ConfigError, match="contradicts kv_cache_backend='paged'"):
        with_backend({"kv_cache_backend": "paged"}, "tagma")
    with pytest.raises(ConfigError, match="must then be a dict, not object"):
        with_backend(object(), "tagma")
    with pytest.raises(ConfigError, match="Choices: paged, tagma"):
        with_backend({}, "range")
