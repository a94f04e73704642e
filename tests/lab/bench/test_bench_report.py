"""The report: every section, every figure from the file, and nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_tagma.lab.bench import schema
from vllm_tagma.lab.report import content, html_page, markdown
from vllm_tagma.lab.report.charts import Bar, Row, bar_chart
from vllm_tagma.lab.report.document import Bullets, Document, Figure, Section, Table
from vllm_tagma.lab.report.report_command import report, write_report

if TYPE_CHECKING:
    from conftest import Make

SECTIONS = [
    "In short",
    "Ratios against vLLM",
    "Cost per operation",
    "Slot mapping",
    "Whole scheduler steps, and the engine",
    "Host memory",
    "All figures",
    "Method",
    "Machine, versions, commit",
    "What is not shown",
]


class _Checker(HTMLParser):
    """Tags that are opened and never closed, and everything that refers to something outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "img"}:
            self.open.append(tag)
        self.references += [v for k, v in attrs if k in {"src", "href"} and v]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_sections_in_order(make_result: Make) -> None:
    document = content.build([make_result()])
    assert [section.title for section in document.sections] == SECTIONS


def test_the_page_is_whole_and_needs_nothing_else(make_result: Make) -> None:
    page = html_page.render(content.build([make_result()]))
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.references
    for reference in checker.references:
        assert reference.startswith(("#s", "data:image/svg+xml;base64,"))
    assert "<script" not in page
    anchors = set(re.findall(r'<h2 id="(\w+)"', page))
    assert {r[1:] for r in checker.references if r.startswith("#")} == anchors


def test_text_from_the_file_is_escaped(make_result: Make) -> None:
    page = html_page.render(content.build([make_result()]))
    assert "Example &lt;CPU&gt; | 9000" in page
    assert "<CPU>" not in page
    text = markdown.render(content.build([make_result()]), figures="figures")
    assert "| machine.cpu | Example \\<CPU> \\| 9000 |" in text


def test_figures_of_the_page(make_result: Make) -> None:
    text = markdown.render(content.build([make_result(factor=12.5)]), figures="figures")
    assert "3 of 3 targets that this run measured are met." in text
    assert "12.50x, at least 8x wanted" in text
    assert "90 bytes/block, at most 96 wanted" in text
    assert "| slots of a prefill | range | 4 | 4,096 | 0.00098 |" in text
    assert "| slots of a prefill | paged | 4,096 | 4,096 | 1.00000 |" in text
    assert "| source.commit | 0123abc |" in text
    assert "| machine.governor | unknown |" in text
    assert "| versions.vllm_tagma | 9.8.7 |" in text
    assert "scheduler/step/512: a note" in text
    assert "Not measured in this run: engine/tokens_per_second/256 (not part of --quick)." in text
    assert "None of these is slower than vLLM's" in text


def test_a_loss_is_said_plainly(make_result: Make) -> None:
    text = markdown.render(content.build([make_result(factor=0.5)]), figures="figures")
    assert "1 of 3 targets that this run measured are met." in text
    assert "Slower than vLLM: title of manager/decode_allocate/512 (0.50x); title of sched" in text
    assert "| 0.50x, at least 8x wanted | 0.50..0.50 | missed |" in text


def test_doubts_about_the_machine_are_said(make_result: Make) -> None:
    result = make_result()
    result.environment["machine"].update(load_average=[7.0, 7.0, 7.0], hypervisor=True)
    result.environment["source"] = {"commit": None, "modified": None}
    result.quick = True
    text = markdown.render(content.build([result]), figures="figures")
    assert "load average 7.0 on 2 CPUs" in text
    assert "A virtual machine" in text
    assert "The commit is not known" in text
    assert "Do not quote it" in text


def test_the_newest_run_is_reported_and_the_older_compared(make_result: Make) -> None:
    old = make_result(factor=5.0, created="2026-01-01T00:00:00+00:00")
    new = make_result(factor=10.0, created="2026-02-01T00:00:00+00:00")
    document = content.build([new, old])
    assert "measured 2026-02-01" in document.subtitle
    titles = [section.title for section in document.sections]
    assert "Compared with 2026-01-01T00:00:00+00:00" in titles
    text = markdown.render(document, figures="figures")
    assert "| manager/decode_allocate/512 | ratio | 5.00x | 10.00x | 2.00 | better |" in text


def test_charts_are_svg_with_their_labels(make_result: Make) -> None:
    names = set()
    for figure in content.build([make_result()]).figures:
        root = ElementTree.fromstring(figure.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert figure.alt
        assert figure.caption
        names.add(figure.name)
    assert names == {"ratios", "native", "manager", "slots", "scheduler"}


def test_the_same_figures_give_the_same_chart() -> None:
    rows = [Row("a", [Bar(2.0, 1.0, 3.0, "2 ns"), None]), Row("b", [None, Bar(9.0, 8.0, 9.5, "9")])]
    charts = {
        bar_chart(rows, series=["x", "y"], axis="ns", log=log, marks=[1.0, None], reference=1.0)
        for log in (True, True, False)
    }
    assert len(charts) == 2
    with pytest.raises(ValueError, match="a chart of nothing"):
        bar_chart([], series=["x"], axis="ns", log=True)


def test_a_result_of_one_scenario_makes_a_report(make_result: Make) -> None:
    result = make_result()
    del result.scenarios[1:]
    document = content.build([result])
    assert "no scenario that has a target" in str(document.sections[0].blocks)
    html_page.render(document)


def test_rendering_of_each_block() -> None:
    document = Document(
        title="T & U",
        subtitle="s",
        sections=[
            Section(
                title="one",
                blocks=[
                    "text <b>",
                    Table(columns=["a", "b"], rows=[["x", "1"]], numeric=frozenset({1})),
                    Bullets(items=["first"]),
                ],
            )
        ],
    )
    assert markdown.render(document, figures="f") == (
        "# T & U\n\ns\n\n## one\n\ntext \\<b>\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\n- first\n"
    )
    page = html_page.render(document)
    assert "<h1>T &amp; U</h1>" in page
    assert '<td>x</td>\n<td style="text-align:right">1</td>' in page
    assert "<p>text &lt;b&gt;</p>" in page


class _Texts(HTMLParser):
    """The words of each element that holds text, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, []))
        if tag == "img":
            self.found[-1][1].extend((dict(attrs)["alt"] or "").split())

    def handle_data(self, data: str) -> None:
        if self.found:
            self.found[-1][1].extend(data.split())


_MARKUP = "*_`~#>-+=|<[]()!&;$\\\"'.:/ \n\tab1é"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from(_MARKUP), min_size=1).filter(str.strip)
    | st.text(st.characters(exclude_categories=["C"]), min_size=1).filter(str.strip)
)
@example("1. one")
@example("    indented")
@example("&amp; &#35; \\| <b>")
@example("---")
@example("~~~")
def test_text_is_never_markup(text: str) -> None:
    svg = "<svg/>"
    table = Table(columns=[text, "b"], rows=[[text, "1"]], numeric=frozenset({1}))
    figure = Figure(name="f", svg=svg, alt=text, caption=text)
    blocks: list[str | Table | Figure | Bullets] = [text, table, Bullets(items=[text]), figure]
    document = Document(title=text, subtitle=text, sections=[Section(title=text, blocks=blocks)])
    texts = _Texts()
    texts.feed(html_page.render(document).partition("<main>")[2])
    words = text.split()
    tags = ("h1", "p", "a", "h2", "p", "th", "th", "td", "td", "li", "img", "em")
    assert [found for found in texts.found if found[1]] == [
        (tag, {"th": ["b"], "td": ["1"]}[tag] if tags[:i].count(tag) and tag[0] == "t" else words)
        for i, tag in enumerate(tags)
    ]


def test_files_written(make_result: Make, tmp_path: Path) -> None:
    source = tmp_path / "host.json"
    schema.write(make_result(), source)
    page, text = write_report([source], tmp_path / "out")
    assert page.name == "report.html"
    linked = re.findall(r"\]\((figures/\w+\.svg)\)", text.read_text())
    assert len(linked) == 5
    embedded = {
        base64.b64decode(data) for data in re.findall(r"svg\+xml;base64,([^\"]+)", page.read_text())
    }
    assert {(tmp_path / "out" / name).read_bytes() for name in linked} == embedded


def test_the_command_refuses_what_is_no_result(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report)
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    done = CliRunner().invoke(app, [str(bad), "--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "is not a result of 'tagma bench host'" in done.output
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_way_out_is_named(
    make_result: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_tagma.lab.report.charts import ChartError

    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    source = tmp_path / "host.json"
    schema.write(make_result(), source)
    with pytest.raises(ChartError, match=r"pip install 'vllm-tagma\[bench\]'"):
        write_report([source], tmp_path / "out")
