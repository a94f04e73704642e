"""Charts of the serve benchmark: latency distributions, memory over time, shares of a step."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tagma.lab.report.charts import BLUE, GREY, ORANGE, STYLE, WIDTH_INCHES, pyplot

COLOURS: Mapping[str, str] = {"paged": ORANGE, "tagma": BLUE}
_SHADES = (BLUE, "#6a4fb3", "#2e8b57", "#c8792b", "#d3d7dd")
_POINTS = 300  # of a curve: a million latencies look the same
_STYLES = ("-", "--", "-.", ":")


def distributions(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], *, unit: str
) -> str:
    """Cumulative distributions, a panel a quantity, a line a run, as SVG text.

    ``panels``: quantity to backend to runs of values. The axis is logarithmic where the values
    spread over more than a decade.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(WIDTH_INCHES, 3.0), layout="constrained", squeeze=False
        )
        for axis, (title, by_backend) in zip(axes[0], panels.items(), strict=True):
            everything = [value for runs in by_backend.values() for run in runs for value in run]
            for backend, runs in by_backend.items():
                for number, run in enumerate(runs):
                    values, shares = curve(run)
                    axis.plot(
                        values,
                        shares,
                        color=COLOURS[backend],
                        ls=_STYLES[number % len(_STYLES)],
                        lw=1.3,
                        label=backend if number == 0 else None,
                    )
            least = min((value for value in everything if value > 0), default=0.0)
            if least and max(everything) > 10 * least:
                axis.set_xscale("log")
                axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
            axis.set_title(title, fontsize=9, loc="left")
            axis.set_xlabel(unit)
            axis.set_ylim(0, 1.01)
            axis.grid(color="#e6e8ec", lw=0.8)
            axis.set_axisbelow(True)
        axes[0][0].set_ylabel("share of values at or below")
        _legend(figure, axes[0][0])
        return _svg(plt, figure)


def curve(values: Sequence[float]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Quantiles and their shares: the cumulative distribution, thinned to a few hundred points."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    shares = np.linspace(0.0, 1.0, min(_POINTS, max(len(ordered), 2)))
    return np.quantile(ordered, shares), shares


def over_time(panels: Mapping[str, Mapping[str, Sequence[Sequence[tuple[float, float]]]]]) -> str:
    """Lines over seconds since the server was ready, a panel a quantity, a line a run, as SVG."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(panels),
            1,
            figsize=(WIDTH_INCHES, 2.1 * len(panels) + 0.4),
            layout="constrained",
            squeeze=False,
            sharex=True,
        )
        for (axis,), (title, by_backend) in zip(axes, panels.items(), strict=True):
            for backend, runs in by_backend.items():
                for number, run in enumerate(runs):
                    axis.plot(
                        [t for t, _ in run],
                        [value for _, value in run],
                        color=COLOURS[backend],
                        ls=_STYLES[number % len(_STYLES)],
                        lw=1.1,
                        label=backend if number == 0 else None,
                    )
            axis.set_title(title, fontsize=9, loc="left")
            axis.set_ylim(bottom=0)
            axis.grid(color="#e6e8ec", lw=0.8)
            axis.set_axisbelow(True)
        axes[-1][0].set_xlabel("seconds since the server was ready")
        _legend(figure, axes[0][0])
        return _svg(plt, figure)


def stacked_shares(shares: Mapping[str, Mapping[str, float]]) -> str:
    """One bar a backend, its categories side by side in per cent of a step, as SVG text."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(
            figsize=(WIDTH_INCHES, 0.9 + 0.55 * len(shares)), layout="constrained"
        )
        names = list(shares)
        categories = list(next(iter(shares.values())))
        left = np.zeros(len(names))
        for number, category in enumerate(categories):
            widths = np.array([100.0 * shares[name][category] for name in names])
            colour = _SHADES[number % len(_SHADES)]
            axis.barh(names, widths, left=left, color=colour, label=category, height=0.6)
            for y, (start, width) in enumerate(zip(left, widths, strict=True)):
                if width >= 6.0:
                    axis.text(
                        start + width / 2,
                        y,
                        f"{width:.1f} %",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="#1c1e21" if colour == _SHADES[-1] else "white",
                    )
            left += widths
        axis.set_xlim(0, 100)
        axis.invert_yaxis()
        axis.set_xlabel("per cent of a step")
        axis.axvline(0, color=GREY, lw=0.8)
        figure.legend(loc="outside upper center", ncols=len(categories), frameon=False, fontsize=8)
        return _svg(plt, figure)


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)


def _svg(plt: Any, figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return out.getvalue()
