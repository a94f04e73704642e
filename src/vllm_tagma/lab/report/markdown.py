"""The report as Markdown; figures are files beside it."""

from __future__ import annotations

from vllm_tagma.lab.report.document import Bullets, Document, Figure, Table


def render(document: Document, *, figures: str) -> str:
    """The Markdown text. ``figures`` is the folder of the SVG files, relative to it."""
    lines = [f"# {document.title}", "", document.subtitle, ""]
    for section in document.sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            if isinstance(block, Table):
                lines += _table(block)
            elif isinstance(block, Figure):
                lines += [f"![{_escape(block.alt)}]({figures}/{block.name}.svg)", ""]
                lines += [f"*{block.caption}*"]
            elif isinstance(block, Bullets):
                lines += [f"- {item}" for item in block.items]
            else:
                lines.append(block)
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
    rows = [table.columns, rule, *table.rows]
    return ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
