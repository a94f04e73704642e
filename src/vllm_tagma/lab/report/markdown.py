"""The report as Markdown; figures are files beside it."""

from __future__ import annotations

import re

from vllm_tagma.lab.report.document import Bullets, Document, Figure, Table

# What would be markup, on GitHub too: an underscore only at the edge of a word, an ampersand only
# before what could be an entity, a sharp only at the end of a heading.
_MARKUP = re.compile(r"[\\`*\[\]<|~$]|(?<![^\W_])_|_(?![^\W_])|&(?=[#\w])|(?<= )#(?=#*$)")
# What begins a heading, list or quote, or is a rule; "-10.0 %" and "12.5x" are none of them.
_BLOCK = re.compile(r"^(\d*)([-+#=>.)])(?:(?<=>)|(?=[-#=]*(?:\s|$)))")


def render(document: Document, *, figures: str) -> str:
    """The Markdown text; whatever the document's text holds is text there, never markup.

    ``figures`` is the folder of the SVG files, relative to it.
    """
    lines = [f"# {escape(document.title)}", "", escape(document.subtitle), ""]
    for section in document.sections:
        lines += [f"## {escape(section.title)}", ""]
        for block in section.blocks:
            if isinstance(block, Table):
                lines += _table(block)
            elif isinstance(block, Figure):
                lines += [f"![{escape(block.alt)}]({figures}/{block.name}.svg)", ""]
                lines += [f"*{escape(block.caption)}*"]
            elif isinstance(block, Bullets):
                lines += [f"- {escape(item)}" for item in block.items]
            else:
                lines.append(escape(block))
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """``text`` as Markdown that shows it; white space becomes single spaces."""
    line = _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
    return _BLOCK.sub(r"\1\\\2", line)


def _table(table: Table) -> list[str]:
    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
    rows = [[escape(cell) for cell in row] for row in (table.columns, *table.rows)]
    return ["| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:])]
