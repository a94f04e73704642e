"""What is served and what is refused: one table, from which refusals and document both come.

Closed where not proven: a configuration that changes what KV-cache blocks mean is refused at
start-up, with the option that set it and the way out, until a test shows equal results for it.
Nothing falls back to paging by itself.

The table is in ``support_rules.py``. Gate 1 is ``create_engine_config`` in the front end, which
sees the ``VllmConfig``; gate 2 is the scheduler's constructor in the engine core, which also sees
the ``KVCacheConfig`` that the loaded model led to. ``python -m vllm_tagma.support`` writes
``docs/support.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vllm_tagma import versions
from vllm_tagma.errors import UnsupportedError

Status = Literal["served", "planned", "refused"]

Find = Callable[[Any], "str | None"]
"""Looks into a configuration; returns the offending value as text, or ``None`` if it is fine."""

DOCUMENT: Final = Path("docs") / "support.md"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the support matrix.

    A row that is not served has ``in_config`` (looks into a ``VllmConfig``) or ``in_cache``
    (looks into a ``KVCacheConfig``). ``planned`` rows are refused today like ``refused`` ones;
    the word only tells what to expect.
    """

    id: str
    title: str
    option: str
    status: Status
    why: str
    way_out: str = ""
    in_config: Find | None = None
    in_cache: Find | None = None

    def message(self, value: str) -> str:
        """The refusal: what, which option with which value, why, and the way out."""
        later = " yet" if self.status == "planned" else ""
        return (
            f"--kv-cache-backend tagma does not serve {self.title}{later}: {self.option} is "
            f"{value}. {self.why}. Way out: {self.way_out}, or use --kv-cache-backend paged."
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that a configuration breaks."""

    rule: Rule
    value: str

    @property
    def message(self) -> str:
        """The sentence a user is shown."""
        return self.rule.message(self.value)


def rules() -> tuple[Rule, ...]:
    """The whole table."""
    from vllm_tagma import support_rules

    return support_rules.RULES


def explain(vllm_config: Any, kv_cache_config: Any = None) -> list[Finding]:
    """Everything that would be refused, in the order of the table; empty if it is served.

    ``vllm_config`` need not ask for tagma. Without ``kv_cache_config``, which exists only once a
    model is loaded, the rules about the kinds of cache groups cannot speak.

    Raises:
        ConfigError: the options of the backend in ``additional_config`` are not readable.
    """
    findings = []
    for rule in rules():
        value = rule.in_config(vllm_config) if rule.in_config else None
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


_HEADINGS: Final[dict[Status, tuple[str, str]]] = {
    "served": ("Served", "These work with `--kv-cache-backend tagma` as they do with `paged`."),
    "planned": (
        "Planned, refused today",
        "Start-up stops with a message that names the option and the way out.",
    ),
    "refused": (
        "Refused",
        "As above, and no work on them is planned: they conflict with the backend, or serve a "
        "purpose that it does not have.",
    ),
}


def render_markdown() -> str:
    """``docs/support.md``, from the table."""
    known = " and ".join(versions.KNOWN_VLLM_SERIES)
    lines = [
        "# Support matrix",
        "",
        "<!-- Written by `python -m vllm_tagma.support` from `src/vllm_tagma/support_rules.py`; "
        "do not edit. -->",
        "",
        f"vLLM {known}, Python 3.11 and later. Any other vLLM release is refused when tagma is "
        "asked for; serving with `--kv-cache-backend paged` is never affected by the plugin.",
        "",
        "A configuration that is not served stops start-up. Nothing falls back to paging by "
        "itself.",
    ]
    for status, (heading, text) in _HEADINGS.items():
        lines += ["", f"## {heading}", "", text, ""]
        if status == "served":
            lines += ["| What | Option | Note |", "|---|---|---|"]
        else:
            lines += ["| What | Option | Why | Way out | Id |", "|---|---|---|---|---|"]
        for rule in (rule for rule in rules() if rule.status == status):
            cells = [rule.title[:1].upper() + rule.title[1:], f"`{rule.option}`", rule.why]
            if status != "served":
                cells += [rule.way_out, f"`{rule.id}`"]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += [
        "",
        "## Where the choice can get lost",
        "",
        "The choice of backend travels in `additional_config`, whose unknown keys vLLM ignores. "
        "Where this package is not installed, or `VLLM_PLUGINS` leaves it out, the flag does not "
        "exist and is an error, but `additional_config` alone would serve paged. "
        '`scheduler_cls="vllm_tagma.integration.scheduler.TagmaScheduler"` given beside it is '
        "an error there too. `tagma doctor` reports both cases.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Write ``docs/support.md`` below the working directory, or to the path given."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCUMENT
    if not target.parent.is_dir():
        sys.exit(f"{target.parent} is not a folder; run from the repository root or give a path.")
    target.write_text(render_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
