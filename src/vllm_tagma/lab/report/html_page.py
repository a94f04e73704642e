"""The report as one HTML file that needs nothing else: style inside, charts as data URIs."""

from __future__ import annotations

import base64
from html import escape

from markdown_it import MarkdownIt

from vllm_tagma.lab.report import markdown
from vllm_tagma.lab.report.document import Document

_SECTION = ("heading_open", "h2")

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
h1 + p { color: #565b63; margin-bottom: 1rem; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; }
nav a, a { color: #1f5fa8; }
table { border-collapse: collapse; font-size: .88rem; display: block; overflow-x: auto;
  margin: .8rem 0; }
th, td { text-align: left; padding: .28rem .75rem .28rem 0; border-bottom: 1px solid #e6e8ec;
  vertical-align: top; }
th { font-weight: 600; border-bottom-color: #9aa0a9; white-space: nowrap; }
[style*=right] { font-variant-numeric: tabular-nums; white-space: nowrap; }
p:has(> img) { max-width: none; }
img { max-width: 100%; height: auto; display: block; }
p > em:only-child { color: #565b63; font-size: .88rem; font-style: normal; }
li { max-width: 46rem; }
@media print { nav { display: none; } h2 { break-after: avoid; } img { break-inside: avoid; } }
"""


def render(document: Document) -> str:
    """The page: the Markdown text as HTML. All text is escaped: names come from files."""
    reader = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    tokens = reader.parse(markdown.render(document, figures="figures"))
    headings = [i for i, token in enumerate(tokens) if (token.type, token.tag) == _SECTION]
    links = ""
    for number, (place, section) in enumerate(zip(headings, document.sections, strict=True), 1):
        tokens[place].attrSet("id", f"s{number}")
        links += f'<li><a href="#s{number}">{escape(section.title)}</a></li>'
    first = min(headings, default=len(tokens))
    above, below = (
        reader.renderer.render(part, reader.options, {})
        for part in (tokens[:first], tokens[first:])
    )
    for figure in document.figures:
        # As images, because several inline SVGs would share their ids.
        data = base64.b64encode(figure.svg.encode()).decode()
        below = below.replace(
            f'src="figures/{figure.name}.svg"', f'src="data:image/svg+xml;base64,{data}"'
        )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{above}<nav><ul>{links}</ul></nav>\n{below}</main>\n</body>\n</html>\n"
    )
