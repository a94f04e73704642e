"""The questions asked of the table: what would be refused, and the refusals themselves."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from vllm_tagma.errors import UnsupportedError
from vllm_tagma.support.rule import Finding, Rule
from vllm_tagma.support.rule_table import RULES

_BY_ID: Final = {rule.id: rule for rule in RULES}


def rules() -> tuple[Rule, ...]:
    """The whole table."""
    return RULES


def explain(vllm_config: Any, kv_cache_config: Any = None) -> list[Finding]:
    """Everything that would be refused, in the order of the table; empty if it is served.

    ``vllm_config`` need not ask for tagma. Without ``kv_cache_config``, which exists only once a
    model is loaded, the rules about the kinds of cache groups cannot speak; without
    ``vllm_config``, which the manager is not given, only they do.

    Raises:
        ConfigError: the options of the backend in ``additional_config`` are not readable.
    """
    findings = []
    for rule in RULES:
        value = None
        if rule.in_config and vllm_config is not None:
            value = rule.in_config(vllm_config)
        if value is None and rule.in_cache and kv_cache_config is not None:
            value = rule.in_cache(kv_cache_config)
        if value is not None:
            findings.append(Finding(rule=rule, value=value))
    return findings


def require_supported(vllm_config: Any, kv_cache_config: Any = None) -> None:
    """Stop unless every rule is satisfied.

    Raises:
        UnsupportedError: with the message of each broken rule, so that one start shows them all.
        ConfigError: the options of the backend are not readable.
    """
    messages = [finding.message for finding in explain(vllm_config, kv_cache_config)]
    if messages:
        raise UnsupportedError("\n".join(messages))


def refuse(rule_id: str, value: object, *, option: str | None = None) -> NoReturn:
    """Stop because of one rule, for code that meets ``value`` outside a configuration.

    Past the gates, whoever builds a manager or a block table by hand gets what is served or the
    same refusal. ``option`` names what has the value, where that is not the option of the rule.

    Raises:
        UnsupportedError: always, with the message of the rule.
        KeyError: no rule has this id, which a test excludes.
    """
    raise UnsupportedError(_BY_ID[rule_id].message(str(value), option=option))
