"""``docs/support.md``, written from the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_tagma import versions
from vllm_tagma.support.rule import Status
from vllm_tagma.support.rule_table import RULES

DOCUMENT: Final = Path("docs") / "support.md"

_HEADINGS: Final[dict[Status, tuple[str, str]]] = {
    "served": (
        "Served",
        "These work with `--kv-cache-backend tagma` as they do with `paged`; the tests that show "
        "it are named beside them.",
    ),
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
        "<!-- Written by `python -m vllm_tagma.support` from `src/vllm_tagma/support/`; "
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
            lines += ["| What | Option | Note | Shown by |", "|---|---|---|---|"]
        else:
            lines += ["| What | Option | Why | Way out | Id |", "|---|---|---|---|---|"]
        for rule in (rule for rule in RULES if rule.status == status):
            cells = [rule.title[:1].upper() + rule.title[1:], f"`{rule.option}`", rule.why]
            if status == "served":
                cells.append("<br>".join(f"`{test}`" for test in rule.proof))
            else:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``docs/support.md`` below the working directory, or to the path given.

    Ends the process with status 2 for other arguments, with 1 if the folder is not there.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vllm_tagma.support", description="Writes the support matrix as Markdown."
    )
    parser.add_argument("path", nargs="?", type=Path, default=DOCUMENT, help=f"default: {DOCUMENT}")
    target = parser.parse_args(arguments).path
    if not target.parent.is_dir():
        sys.exit(f"{target.parent} is not a folder; run from the repository root or give a path.")
    target.write_text(render_markdown(), encoding="utf-8")
