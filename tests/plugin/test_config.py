"""Options: every one readable, everything else an error that names the choices."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_tagma.config import (
    COMPACTIONS,
    DEFAULT_COMPACTION,
    MAX_COPY_BUDGET,
    TagmaConfig,
    backend_of,
    with_backend,
    with_option,
)
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
    expected = TagmaConfig(
        alignment=1,
        compaction=DEFAULT_COMPACTION,
        copy_budget=4096,
        debug_slots=False,
        check_invariants=False,
    )
    assert TagmaConfig.from_sources({"kv_cache_backend": "tagma"}, {}) == expected
    assert TagmaConfig.from_sources(None, {}) == expected


def test_options_are_read() -> None:
    options: dict[str, Any] = {
        "alignment": 4,
        "compaction": "live",
        "copy_budget": 7,
        "debug_slots": True,
        "check_invariants": True,
    }
    assert TagmaConfig.from_sources({"tagma": options}, {}) == TagmaConfig(**options)


@pytest.mark.parametrize("budget", [0, 1, MAX_COPY_BUDGET])
@pytest.mark.parametrize("compaction", COMPACTIONS)
def test_every_choice_and_bound_is_admitted(compaction: str, budget: int) -> None:
    options = {"compaction": compaction, "copy_budget": budget}
    environment = {
        "VLLM_TAGMA_COMPACTION": compaction,
        "VLLM_TAGMA_COPY_BUDGET": str(budget),
    }
    for config in (
        TagmaConfig.from_sources({"tagma": options}, {}),
        TagmaConfig.from_sources({}, environment),
    ):
        assert (config.compaction, config.copy_budget) == (compaction, budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"aligment": 1},
            "unknown option 'aligment'.*alignment, compaction, copy_budget, copy_bytes, pool_map",
        ),
        ({"alignment": True}, "'alignment'.*=True must be of type int, not bool"),
        ({"alignment": "4"}, "'alignment'.*='4' must be of type int, not str"),
        ({"alignment": 0}, "'alignment'.*=0 must be at least 1 block"),
        ({"alignment": -3}, "'alignment'.*=-3 must be at least 1 block"),
        ({"compaction": "none"}, "'compaction'.*='none' must be one of off, idle, live"),
        ({"compaction": "Idle"}, "'compaction'.*='Idle' must be one of off, idle, live"),
        ({"compaction": None}, "'compaction'.*=None must be one of off, idle, live"),
        ({"compaction": True}, r"'compaction'.*=True must be one of off, idle, live\.$"),
        ({"compaction": False}, "=False must be one of .*YAML reads a bare off as false: quote it"),
        ({"copy_budget": -1}, "'copy_budget'.*=-1 must be 0 to 65536 blocks a step"),
        ({"copy_budget": 65537}, "'copy_budget'.*=65537 must be 0 to 65536 blocks a step"),
        ({"copy_budget": "8"}, "'copy_budget'.*='8' must be of type int, not str"),
        ({"copy_budget": 8.0}, "'copy_budget'.*=8.0 must be of type int, not float"),
        ({"copy_budget": True}, "'copy_budget'.*=True must be of type int, not bool"),
        ({"copy_bytes": "1.5G"}, "'copy_bytes'.*: '1.5G' is neither auto nor a size such as 512M"),
        ({"copy_bytes": 512}, "'copy_bytes'.*=512 must be of type str, not int"),
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


def test_the_environment_wins_over_compaction_and_budget() -> None:
    given = {"tagma": {"compaction": "off", "copy_budget": 1}}
    environment = {"VLLM_TAGMA_COMPACTION": "live", "VLLM_TAGMA_COPY_BUDGET": "0"}
    config = TagmaConfig.from_sources(given, environment)
    assert (config.compaction, config.copy_budget) == ("live", 0)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("VLLM_TAGMA_COMPACTION", "", "='' must be one of off, idle, live"),
        ("VLLM_TAGMA_COMPACTION", "1", "='1' must be one of off, idle, live"),
        ("VLLM_TAGMA_COMPACTION", "LIVE", "='LIVE' must be one of off, idle, live"),
        ("VLLM_TAGMA_COPY_BUDGET", "", "='' must be a whole number.*the option 'copy_budget'"),
        ("VLLM_TAGMA_COPY_BUDGET", " 8", "=' 8' must be a whole number"),
        ("VLLM_TAGMA_COPY_BUDGET", "1_0", "='1_0' must be a whole number"),
        ("VLLM_TAGMA_COPY_BUDGET", "8.0", "='8.0' must be a whole number"),
        ("VLLM_TAGMA_COPY_BUDGET", "9" * 5000, "='9+' must be a whole number"),
        ("VLLM_TAGMA_COPY_BUDGET", "-1", "=-1 must be 0 to 65536 blocks a step"),
        ("VLLM_TAGMA_COPY_BUDGET", "65537", "=65537 must be 0 to 65536 blocks a step"),
    ],
)
def test_wrong_environment_values_are_errors(name: str, raw: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}{message}"):
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


def test_with_option_copies_and_detects_contradictions() -> None:
    given = {"a": 1, "kv_cache_backend": "tagma", "tagma": {"debug_slots": True}}
    found = with_option(given, "copy_budget", 0)
    assert found == {**given, "tagma": {"debug_slots": True, "copy_budget": 0}}
    assert given["tagma"] == {"debug_slots": True}
    assert with_option(found, "copy_budget", 0) == found
    with pytest.raises(
        ConfigError, match=r"--tagma-copy-budget 1 contradicts tagma\.copy_budget=0 in"
    ):
        with_option(found, "copy_budget", 1)


@pytest.mark.parametrize("backend", [None, {}, object(), {"kv_cache_backend": "paged"}])
def test_with_option_without_the_backend_is_an_error(backend: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--tagma-compaction live has no effect.*Add --kv-cache-backend tagma or drop",
    ):
        with_option(backend, "compaction", "live")


def test_with_option_checks_the_value_and_its_surroundings() -> None:
    tagma = {"kv_cache_backend": "tagma"}
    with pytest.raises(ConfigError, match=r"^--tagma-copy-budget=-1 must be 0 to 65536"):
        with_option(tagma, "copy_budget", -1)
    with pytest.raises(ConfigError, match="unknown option 'copy_budgt'"):
        with_option({**tagma, "tagma": {"copy_budgt": 1}}, "copy_budget", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experimental_gpu": True}, "'experimental_gpu'.* is gone.*--tagma-self-test start"),
        ({"self_test": "on"}, "'self_test'.*='on' must be one of off, start, always"),
        ({"self_test": False}, r"=False must be one of.*YAML reads a bare off as false"),
        ({"self_test_steps": -1}, "'self_test_steps'.*=-1 must be 0 to 1000000 steps"),
    ],
)
def test_the_self_test_is_chosen_strictly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TagmaConfig.from_sources({"tagma": options}, {})
    assert TagmaConfig.from_sources({"tagma": {"self_test": "always"}}, {}).self_test == "always"
