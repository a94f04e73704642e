"""Charts of the report, drawn by matplotlib as SVG.

matplotlib rather than a JavaScript library: its SVG is small, needs no script, and prints; a page
with an interactive library inside would weigh megabytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_tagma.errors import TagmaError

BLUE, ORANGE, GREY = "#1f5fa8", "#c8792b", "#8a9099"
_COLOURS = (BLUE, ORANGE, GREY)
WIDTH_INCHES = 9.2


class ChartError(TagmaError, RuntimeError):
    """matplotlib is not installed."""


class Bar(NamedTuple):
    """A value with the ends of its error bar, and the text beside it."""

    value: float
    low: float
    high: float
    text: str


class Row(NamedTuple):
    """A labelled group of bars, one per series; None leaves a gap."""

    label: str
    bars: Sequence[Bar | None]


def bar_chart(
    rows: Sequence[Row],
    *,
    series: Sequence[str],
    axis: str,
    log: bool,
    marks: Sequence[float | None] | None = None,
    reference: float | None = None,
) -> str:
    """Horizontal bars with error bars, as SVG text.

    ``log``: bars are drawn from a decade below the least value. ``marks``: a tick per row, for
    targets. ``reference``: a vertical line. Raises :class:`ChartError` without matplotlib and
    ValueError without rows.
    """
    if not rows:
        raise ValueError("a chart of nothing")
    plt = pyplot()
    count = len(series)
    step = 0.8 / count
    height = 0.75 + len(rows) * max(0.34, 0.23 * count + 0.12)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH_INCHES, height), layout="constrained")
        left, right = _limits(rows, log=log, marks=marks, reference=reference)
        for index, name in enumerate(series):
            drawn = [(y, row.bars[index]) for y, row in enumerate(rows) if row.bars[index]]
            places = [y + (index - (count - 1) / 2) * step for y, _ in drawn]
            bars = [bar for _, bar in drawn if bar is not None]
            axes.barh(
                places,
                [bar.value - left for bar in bars],
                left=left,
                height=step * 0.86,
                color=_COLOURS[index % len(_COLOURS)],
                label=name,
                xerr=[
                    [max(bar.value - bar.low, 0.0) for bar in bars],
                    [max(bar.high - bar.value, 0.0) for bar in bars],
                ],
                error_kw={"ecolor": "#1c1e21", "elinewidth": 0.9, "capsize": 2},
            )
            for y, bar in zip(places, bars, strict=True):
                axes.annotate(
                    bar.text,
                    (max(bar.high, bar.value), y),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
        for y, mark in enumerate(marks or ()):
            if mark is not None:
                axes.plot([mark, mark], [y - 0.45, y + 0.45], color="#1c1e21", lw=1.6)
        if reference is not None:
            axes.axvline(reference, color=GREY, lw=0.9, ls=":")
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_xlim(left, right)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_xlabel(axis)
        axes.grid(axis="x", color="#e6e8ec", lw=0.8)
        axes.set_axisbelow(True)
        if count > 1:
            figure.legend(loc="outside upper right", ncols=count, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()


def _limits(
    rows: Sequence[Row],
    *,
    log: bool,
    marks: Sequence[float | None] | None,
    reference: float | None,
) -> tuple[float, float]:
    bars = [bar for row in rows for bar in row.bars if bar is not None]
    points = [bar.value for bar in bars] + [bar.high for bar in bars]
    points += [mark for mark in marks or () if mark is not None]
    points += [reference] if reference is not None else []
    if not log:
        return 0.0, max(points) * 1.22
    low = min(min(bar.low for bar in bars if bar.low > 0), min(points))
    # Room for the text: a fifth of the axis.
    low /= 2.0
    return low, max(points) * (max(points) / low) ** 0.24


STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "path",  # looks the same whatever fonts the reader has
    "svg.hashsalt": "tagma",  # the same file for the same figures
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a9",
    "figure.facecolor": "white",
}


def pyplot() -> Any:
    """matplotlib's drawing module, set to write SVG. Raises :class:`ChartError` without it."""
    try:
        import matplotlib
    except ImportError:
        raise ChartError(
            "charts are drawn with matplotlib, which is not installed; "
            "install it with: pip install 'vllm-tagma[bench]'"
        ) from None
    matplotlib.use("svg")
    import matplotlib.pyplot

    return matplotlib.pyplot
