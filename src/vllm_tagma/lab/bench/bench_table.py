"""Terminal output of the benchmark: results, targets, comparison."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_tagma.lab.bench.bench_compare import Comparison
from vllm_tagma.lab.bench.schema import Result, Scenario

_STEPS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))


def quantity(value: float, unit: str) -> str:
    """A value for people: ``quantity(4600, "ns/call")`` is ``"4.60 us"``."""
    if unit.startswith("ns/"):
        for size, name in _STEPS:
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} ns"
    if unit == "tokens/s":
        return f"{value:,.0f}"
    return f"{value:.3g}"


def print_result(console: Console, result: Result) -> None:
    """The table of all scenarios, then what was left out and the targets that were missed."""
    for group in dict.fromkeys(scenario.group for scenario in result.scenarios):
        _print_group(console, group, [s for s in result.scenarios if s.group == group])
    for name, reason in result.skipped.items():
        console.print(f"not measured: {name} ({reason})", style="dim", highlight=False)
    missed = [s for s in result.scenarios if s.target_met is False]
    for scenario in missed:
        console.print(f"below target: {scenario.name}, {target_text(scenario)}", style="yellow")


def target_text(scenario: Scenario) -> str:
    """What was wanted and what was measured, in words; empty without a target."""
    if scenario.target is None:
        return ""
    if scenario.target_is_limit:
        value = scenario.variants[scenario.ours].summary.median
        return f"{value:.3g} {scenario.unit}, at most {scenario.target:g} wanted"
    ratio = scenario.ratio
    return f"{ratio.median:.2f}x, at least {scenario.target:g}x wanted" if ratio else ""


def _print_group(console: Console, group: str, scenarios: Iterable[Scenario]) -> None:
    # Fits 80 columns; medians are in the file and in the report.
    table = Table(
        title=group, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0), box=SIMPLE_HEAD
    )
    table.add_column("scenario", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for heading in ("mean", "sd", "ratio", "p10..p90", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    for scenario in scenarios:
        first = True
        for name, variant in scenario.variants.items():
            ratio = scenario.ratio if name == scenario.ours else None
            summary = variant.summary
            table.add_row(
                scenario.name.partition("/")[2] if first else "",
                name,
                *(quantity(value, scenario.unit) for value in (summary.mean, summary.sd)),
                f"{ratio.median:.3g}x" if ratio else "",
                f"{ratio.p10:.3g}..{ratio.p90:.3g}" if ratio else "",
                _target_cell(scenario) if name == scenario.ours else "",
            )
            first = False
    console.print(table)


def _target_cell(scenario: Scenario) -> Text:
    if scenario.target is None or scenario.target_met is None:
        return Text("")
    bound = f"<={scenario.target:g}" if scenario.target_is_limit else f">={scenario.target:g}x"
    return Text(bound, style="green" if scenario.target_met else "yellow")


def print_comparison(console: Console, comparison: Comparison, *, old: str) -> None:
    """What moved since the old result, and what differs between the two machines."""
    table = Table(title=f"compared with {old}", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("scenario", "measure"):
        table.add_column(heading)
    for heading in ("old", "new", "new/old"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for change in comparison.changes:
        ratio = change.measure == "ratio"
        table.add_row(
            change.name,
            change.measure,
            *(
                f"{value:.2f}x" if ratio else quantity(value, change.measure)
                for value in (change.old, change.new)
            ),
            f"{change.factor:.2f}",
            change.verdict,
            style={"better": "green", "worse": "red"}.get(change.verdict),
        )
    console.print(table)
    for label, names in (("only in the old", comparison.only_old), ("new", comparison.only_new)):
        if names:
            console.print(f"{label}: {', '.join(names)}")
    for key, before, after in comparison.environment:
        console.print(f"differs: {key}: {before} -> {after}", style="yellow", highlight=False)
