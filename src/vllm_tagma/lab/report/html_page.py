"""The report as one HTML file that needs nothing else: style inside, charts as data URIs."""

from __future__ import annotations

import base64
from html import escape

from vllm_tagma.lab.report.document import Bullets, Document, Figure, Section, Table

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1c1e21;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .5rem;
  border-top: 1px solid #d9dce1; }
p { max-width: 46rem; margin: .6rem 0; }
.subtitle { color: #565b63; margin-bottom: 1rem; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; }
nav a, a { color: #1f5fa8; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .88rem; }
th, td { text-align: left; padding: .28rem .75rem .28rem 0; border-bottom: 1px solid #e6e8ec;
  vertical-align: top; }
th { font-weight: 600; border-bottom-color: #9aa0a9; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1.1rem 0; }
figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: #565b63; font-size: .88rem; max-width: 46rem; margin-top: .3rem; }
li { max-width: 46rem; }
@media print { nav { display: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


def render(document: Document) -> str:
    """The page. Everything is escaped: names and versions come from files."""
    anchors = [f"s{number}" for number in range(1, len(document.sections) + 1)]
    links = "".join(
        f'<li><a href="#{anchor}">{escape(section.title)}</a></li>'
        for anchor, section in zip(anchors, document.sections, strict=True)
    )
    sections = "\n".join(
        _section(section, anchor)
        for anchor, section in zip(anchors, document.sections, strict=True)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(document.title)}</h1>\n"
        f'<p class="subtitle">{escape(document.subtitle)}</p>\n'
        f"<nav><ul>{links}</ul></nav>\n{sections}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section, anchor: str) -> str:
    parts = [f'<section id="{anchor}">', f"<h2>{escape(section.title)}</h2>"]
    for block in section.blocks:
        if isinstance(block, Table):
            parts.append(_table(block))
        elif isinstance(block, Figure):
            parts.append(_figure(block))
        elif isinstance(block, Bullets):
            items = "".join(f"<li>{escape(item)}</li>" for item in block.items)
            parts.append(f"<ul>{items}</ul>")
        else:
            parts.append(f"<p>{escape(block)}</p>")
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    def cells(row: list[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_class(i, table)}>{escape(cell)}</{tag}>" for i, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells(list(table.columns), 'th')}</tr></thead>"
    body = "".join(f"<tr>{cells(list(row), 'td')}</tr>" for row in table.rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _class(column: int, table: Table) -> str:
    return ' class="n"' if column in table.numeric else ""


def _figure(figure: Figure) -> str:
    # As images, because several inline SVGs would share their ids.
    data = base64.b64encode(figure.svg.encode()).decode()
    return (
        f'<figure><img alt="{escape(figure.alt)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )
