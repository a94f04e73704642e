"""A report as files: a page, the same as text, and its pictures."""

from __future__ import annotations

from pathlib import Path

from vllm_tagma.lab.report import html_page, markdown
from vllm_tagma.lab.report.document import Document


def write_document(document: Document, output: Path) -> list[Path]:
    """Writes ``report.html``, ``report.md`` and ``figures/*.svg``; returns the first two."""
    figures = output / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for figure in document.figures:
        (figures / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
    page, text = output / "report.html", output / "report.md"
    page.write_text(html_page.render(document), encoding="utf-8")
    text.write_text(markdown.render(document, figures="figures"), encoding="utf-8")
    return [page, text]
