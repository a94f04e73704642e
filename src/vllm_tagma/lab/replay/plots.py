"""Pictures of a replay as SVG: the pool over time, ranges of requests, prefix hits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tagma.lab.replay.drive import Replay
from vllm_tagma.lab.replay.pool_sampler import FIRST_REQUEST, PoolSampler
from vllm_tagma.lab.report.charts import BLUE, GREY, ORANGE, STYLE, pyplot

_SERIES = {"paged": ORANGE, "tagma": BLUE}
_HOLE, _CACHED = "#ffffff", "#d3d7dd"
# Twelve hues of much the same lightness: none stands out, none is near the greys.
_REQUESTS = (
    *("#1f5fa8", "#c8792b", "#2e8b57", "#a23b72", "#6a4fb3", "#b8860b"),
    *("#1d8a99", "#c0503e", "#5b8c2a", "#8c5a3c", "#3f7fd0", "#b55fb0"),
)
_WIDTH_INCHES = 9.2
_DPI = 150
_BINS, _LEAST = 80, 12
_DOTS = 3000

Values = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What the pictures need of one backend."""

    replay: Replay
    sampler: PoolSampler


def write_plots(folder: Path, backends: Mapping[str, Drawn], *, suffix: str = "svg") -> list[Path]:
    """Writes ``pool``, ``ranges`` and ``hits`` into ``folder``, which is made; returns the files.

    Raises ``ChartError`` without matplotlib, OSError if the files cannot be written.
    """
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(STYLE):
        for name, draw in (("pool", _pool), ("ranges", _ranges), ("hits", _hits)):
            figure = draw(plt, backends)
            path = folder / f"{name}.{suffix}"
            options = {"metadata": {"Date": None}} if suffix == "svg" else {}
            figure.savefig(path, format=suffix, dpi=_DPI, **options)
            plt.close(figure)
            written.append(path)
    return written


def _pool(plt: Any, backends: Mapping[str, Drawn]) -> Any:
    """Block ids upwards, steps to the right, a colour a request; above the whole pool, of which one
    block in many is shown, below neighbouring blocks from its middle, every one."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = [_HOLE, _CACHED, *_REQUESTS]
    figure, axes = plt.subplots(
        2,
        len(backends),
        figsize=(_WIDTH_INCHES, 7.4),
        height_ratios=(5, 3),
        layout="constrained",
        squeeze=False,
    )
    for column, (name, drawn) in enumerate(backends.items()):
        sampler = drawn.sampler
        rows = zip(sampler.images(), (sampler.whole, sampler.detail), strict=True)
        for panel, (states, block_ids) in zip(axes[:, column], rows, strict=True):
            panel.imshow(
                _colour_numbers(states),
                cmap=ListedColormap(colours),
                vmin=-0.5,
                vmax=len(colours) - 0.5,
                aspect="auto",
                origin="lower",
                interpolation="nearest",
                extent=(0, sampler.steps[-1] or 1, int(block_ids[0]), int(block_ids[-1]) + 1),
            )
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            panel.spines[["top", "right"]].set_visible(True)
        axes[0][column].set_title(f"{name}: the whole pool", fontsize=10, loc="left")
        axes[1][column].set_title(
            f"{name}: {len(sampler.detail)} neighbouring blocks", fontsize=10, loc="left"
        )
        axes[1][column].set_xlabel("scheduler step")
    for panel in axes[:, 0]:
        panel.set_ylabel("block id")
    figure.legend(
        handles=[
            Patch(facecolor=_HOLE, edgecolor=GREY, label="hole"),
            Patch(facecolor=_CACHED, edgecolor=GREY, label="cached, idle"),
            Patch(facecolor=_REQUESTS[0], label="held by a request (a colour each)"),
        ],
        loc="outside upper right",
        ncols=3,
        frameon=False,
    )
    return figure


def _colour_numbers(states: Values) -> Values:
    """Indices into the colours. Neighbours in the trace run at the same time: a stride sets their
    colours apart."""
    requests = states >= FIRST_REQUEST
    shown = states.copy()
    shown[requests] = FIRST_REQUEST + (states[requests] * 7) % len(_REQUESTS)
    return shown


def _ranges(plt: Any, backends: Mapping[str, Drawn]) -> Any:
    """A dot a request, at the step it ended in; the line is the median of its neighbours."""
    figure, panel = plt.subplots(figsize=(_WIDTH_INCHES, 3.6), layout="constrained")
    for name, drawn in backends.items():
        probe = drawn.replay.probe
        steps, own = np.asarray(probe.steps), np.asarray(probe.own)
        every = -(-len(own) // _DOTS) or 1
        panel.plot(
            steps[::every],
            own[::every],
            ".",
            ms=2.5,
            alpha=0.3,
            color=_SERIES[name],
            rasterized=True,
        )
        middle, median = _binned(steps, own, np.median)
        panel.plot(middle, median, color=_SERIES[name], lw=1.8, label=f"{name}, median")
    panel.set_yscale("log")
    panel.set_ylim(bottom=0.8)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    panel.set_ylabel("own ranges of a request")
    return _finished(figure, panel)


def _hits(plt: Any, backends: Mapping[str, Drawn]) -> Any:
    """Share of prompt tokens that hit, of the requests first admitted around a step."""
    figure, panel = plt.subplots(figsize=(_WIDTH_INCHES, 3.0), layout="constrained")
    for name, drawn in backends.items():
        replay = drawn.replay
        steps = np.asarray(replay.admission_steps)
        middle, hit = _binned(steps, np.asarray(replay.hit_tokens), np.sum)
        _, prompt = _binned(steps, np.asarray(replay.admitted_tokens), np.sum)
        # The lines mostly lie on each other: the first is drawn wide, the second narrow on it.
        width = 1.2 if panel.lines else 3.0
        panel.plot(middle, 100 * hit / prompt, color=_SERIES[name], lw=width, label=name)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("prompt tokens hit, %")
    return _finished(figure, panel)


def _finished(figure: Any, panel: Any) -> Any:
    panel.set_xlabel("scheduler step")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.grid(axis="y", color="#e6e8ec", lw=0.8)
    panel.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _binned(steps: Values, values: Values, reduce: Any) -> tuple[Values, Values]:
    """``values`` reduced over bins of ``_LEAST`` entries or more; ``steps`` ascend."""
    bins = np.array_split(np.arange(len(steps)), min(_BINS, max(1, len(steps) // _LEAST)))
    parts = [part for part in bins if len(part)]
    return (
        np.array([steps[part].mean() for part in parts]),
        np.array([reduce(values[part]) for part in parts], dtype=float),
    )
