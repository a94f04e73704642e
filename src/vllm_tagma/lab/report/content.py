"""What a report says: from results to a document.

Every figure comes from the results, every sentence about them is built from the figures. The only
fixed text is the method and the list of what the figures do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_tagma.lab.bench.bench_compare import compare
from vllm_tagma.lab.bench.bench_table import quantity, target_text
from vllm_tagma.lab.bench.schema import Result, Scenario
from vllm_tagma.lab.bench.statistics import Summary
from vllm_tagma.lab.report import prose
from vllm_tagma.lab.report.charts import Bar, Row, bar_chart
from vllm_tagma.lab.report.document import Bullets, Document, Figure, Section, Table

_NATIVE = ("kv_coord_map", "kv_allocator")
_SLOTS = "kv_slot_mapping"


def build(results: Sequence[Result]) -> Document:
    """The report of the newest result; the others are compared with it.

    Raises ValueError without results.
    """
    if not results:
        raise ValueError("a report of no results")
    ordered = sorted(results, key=lambda result: result.created)
    result, older = ordered[-1], ordered[:-1]
    sections = [
        _summary(result),
        _ratios(result),
        _operations(result),
        _slot_mapping(result),
        _whole_steps(result),
        _memory(result),
        _all_figures(result),
        *(_compared(old, result) for old in reversed(older)),
        Section(title="Method", blocks=[*prose.METHOD, *_method_of(result)]),
        _machine(result),
        Section(title="What is not shown", blocks=[Bullets(items=prose.not_shown(result))]),
    ]
    return Document(
        title="vllm-tagma: what the host side costs",
        subtitle=_subtitle(result),
        sections=[section for section in sections if section is not None],
    )


def _subtitle(result: Result) -> str:
    versions = result.environment.get("versions", {})
    machine = result.environment.get("machine", {})
    return (
        f"vllm-tagma {versions.get('vllm_tagma')} against the KV-cache manager of vLLM "
        f"{versions.get('vllm')}, measured {result.created} on {machine.get('cpu')} in "
        f"{result.seconds:.0f} s."
    )


def _summary(result: Result) -> Section:
    with_target = [s for s in result.scenarios if s.target is not None and s.rounds]
    met = sum(s.target_met is True for s in with_target)
    rows = [
        [
            scenario.title,
            target_text(scenario),
            _spread(scenario),
            "met" if scenario.target_met else "missed",
        ]
        for scenario in with_target
    ]
    blocks: list[str | Table | Figure | Bullets] = [
        f"{met} of {len(with_target)} targets that this run measured are met."
        if with_target
        else "This run measured no scenario that has a target."
    ]
    if rows:
        blocks.append(
            Table(columns=["Operation", "Measured", "p10..p90 of rounds", "Target"], rows=rows)
        )
    if result.quick:
        blocks.append("This was a quick run: few rounds, and no engine. Do not quote it.")
    return Section(title="In short", blocks=blocks)


def _ratios(result: Result) -> Section | None:
    scenarios = [s for s in result.scenarios if s.ratio is not None and s.baseline == "vllm"]
    scenarios = [s for s in scenarios if s.unit != "bytes/block"]
    rows = [Row(_label(s), [_ratio_bar(s)]) for s in scenarios]
    if not rows:
        return None
    chart = bar_chart(
        rows,
        series=["ratio"],
        axis="times better than vLLM, log scale",
        log=True,
        marks=[s.target for s in scenarios],
        reference=1.0,
    )
    worse = [s for s in scenarios if s.ratio is not None and s.ratio.median < 1.0]
    text = (
        "Slower than vLLM: "
        + "; ".join(f"{s.title} ({s.ratio.median:.2f}x)" for s in worse if s.ratio)
        + "."
        if worse
        else "None of these is slower than vLLM's in this run."
    )
    return Section(
        title="Ratios against vLLM",
        blocks=[
            "vLLM's cost over ours (for tokens per second: ours over vLLM's), measured in the same "
            "process, round by round. " + text,
            Figure(
                name="ratios",
                svg=chart,
                alt="Bar chart: how many times cheaper than vLLM each operation is",
                caption="Median ratio; whiskers from the 10th to the 90th percentile of the "
                "rounds; upright strokes are targets; the dotted line is vLLM.",
            ),
        ],
    )


def _operations(result: Result) -> Section | None:
    blocks: list[str | Table | Figure | Bullets] = []
    native = [s for s in result.scenarios if s.group in _NATIVE]
    if native:
        rows = [
            Row(f"{_label(s)}" + (f", {name}" if len(s.variants) > 1 else ""), [_time_bar(v, s)])
            for s in native
            for name, v in ((n, variant.summary) for n, variant in s.variants.items())
        ]
        blocks.append(
            Figure(
                name="native",
                svg=bar_chart(rows, series=["ns"], axis="ns per call, log scale", log=True),
                alt="Bar chart: nanoseconds per call of the native core's operations",
                caption="The C++ core, timed inside C++. Mean of the rounds; whiskers are one "
                "standard deviation.",
            )
        )
    manager = [s for s in result.scenarios if s.group == "manager" and s.unit == "ns/call"]
    if manager:
        blocks.append(_cost_chart("manager", manager, "Manager calls, through Python."))
    return Section(title="Cost per operation", blocks=blocks) if blocks else None


def _slot_mapping(result: Result) -> Section | None:
    scenarios = [s for s in result.scenarios if s.group == _SLOTS]
    if not scenarios:
        return None
    blocks: list[str | Table | Figure | Bullets] = [prose.SLOTS]
    rows = [
        Row(f"{_label(s)}, {name}", [_time_bar(variant.summary, s)])
        for s in scenarios
        for name, variant in s.variants.items()
    ]
    blocks.append(
        Figure(
            name="slots",
            svg=bar_chart(rows, series=["ns"], axis="ns per batch, log scale", log=True),
            alt="Bar chart: nanoseconds to map a batch of positions, by table and by range",
            caption="Mean of the rounds; whiskers are one standard deviation.",
        )
    )
    loads = [
        (s, name, variant.counters["loads"], variant.counters["positions"])
        for s in scenarios
        for name, variant in s.variants.items()
        if variant.counters.get("positions") and "loads" in variant.counters
    ]
    if loads:
        blocks += [
            prose.LOADS,
            Table(
                columns=["Batch", "Variant", "Table loads", "Positions", "Loads per position"],
                rows=[
                    [s.title, name, f"{n:,.0f}", f"{positions:,.0f}", f"{n / positions:.5f}"]
                    for s, name, n, positions in loads
                ],
                numeric=frozenset({2, 3, 4}),
            ),
        ]
    return Section(title="Slot mapping", blocks=blocks)


def _whole_steps(result: Result) -> Section | None:
    scenarios = [s for s in result.scenarios if s.group in ("scheduler", "engine")]
    if not scenarios:
        return None
    blocks: list[str | Table | Figure | Bullets] = [prose.WHOLE]
    steps = [s for s in scenarios if s.group == "scheduler"]
    if steps:
        blocks.append(_cost_chart("scheduler", steps, "Whole scheduler steps.", log=False))
    rows = [
        [s.title, *_pair(s), f"{s.ratio.median:.2f}x" if s.ratio else "", _spread(s)]
        for s in scenarios
    ]
    blocks.append(
        Table(
            columns=["Measured", "tagma", "vLLM", "Better by", "p10..p90"],
            rows=rows,
            numeric=frozenset({1, 2, 3, 4}),
        )
    )
    return Section(title="Whole scheduler steps, and the engine", blocks=blocks)


def _memory(result: Result) -> Section | None:
    scenario = result.scenario("manager/memory")
    if scenario is None:
        return None
    ours, stock = (scenario.variants[v].summary.median for v in ("tagma", "vllm"))
    return Section(
        title="Host memory",
        blocks=[
            f"{ours:.1f} bytes a block, against {stock:.1f} of vLLM's Python objects. "
            f"{scenario.note}"
        ],
    )


def _all_figures(result: Result) -> Section:
    rows = []
    for scenario in result.scenarios:
        for name, variant in scenario.variants.items():
            summary = variant.summary
            ratio = scenario.ratio if name == scenario.ours else None
            rows.append(
                [
                    scenario.name,
                    name,
                    *(
                        quantity(value, scenario.unit)
                        for value in (summary.mean, summary.sd, summary.median, summary.minimum)
                    ),
                    f"{summary.rounds} x {scenario.iterations:,}",
                    f"{ratio.median:.2f}x" if ratio else "",
                ]
            )
    notes = [
        f"{', '.join(s.name for s in result.scenarios if s.note == note)}: {note}"
        for note in dict.fromkeys(s.note for s in result.scenarios if s.note)
    ]
    return Section(
        title="All figures",
        blocks=[
            Table(
                columns=[
                    "Scenario",
                    "Variant",
                    "Mean",
                    "SD",
                    "Median",
                    "Least",
                    "Rounds x calls",
                    "Ratio",
                ],
                rows=rows,
                numeric=frozenset(range(2, 8)),
            ),
            Bullets(items=notes),
        ],
    )


def _compared(old: Result, new: Result) -> Section:
    comparison = compare(old, new)
    rows = [
        [
            change.name,
            change.measure,
            *(
                f"{value:.2f}x" if change.measure == "ratio" else quantity(value, change.measure)
                for value in (change.old, change.new)
            ),
            f"{change.factor:.2f}",
            change.verdict,
        ]
        for change in comparison.changes
    ]
    differs = [f"{key}: {a} -> {b}" for key, a, b in comparison.environment]
    blocks: list[str | Table | Figure | Bullets] = [
        f"Run of {old.created}, {old.source or 'without a file name'}.",
        Table(
            columns=["Scenario", "Measure", "Then", "Now", "Now/then", "Verdict"],
            rows=rows,
            numeric=frozenset({2, 3, 4}),
        ),
    ]
    if differs:
        blocks += ["What differs between the two runs:", Bullets(items=differs)]
    return Section(title=f"Compared with {old.created}", blocks=blocks)


def _machine(result: Result) -> Section:
    rows = [[key, prose.readable(value)] for key, value in prose.leaves(result.environment)]
    rows.append(["command", result.command])
    return Section(
        title="Machine, versions, commit",
        blocks=[Table(columns=["What", "Value"], rows=rows)],
    )


def _method_of(result: Result) -> list[str]:
    rounds = sorted({scenario.rounds for scenario in result.scenarios})
    if not rounds:
        return []
    return [
        f"This run: {rounds[0]} to {rounds[-1]} rounds a scenario; calls a round are in the table "
        "of all figures."
    ]


def _cost_chart(
    name: str, scenarios: Iterable[Scenario], caption: str, *, log: bool = True
) -> Figure:
    rows = [
        Row(
            _label(s),
            [_time_bar(s.variants[v].summary, s) if v in s.variants else None for v in _SERIES],
        )
        for s in scenarios
    ]
    unit = "ns per call, log scale" if log else "ns per step"
    return Figure(
        name=name,
        svg=bar_chart(rows, series=list(_SERIES.values()), axis=unit, log=log),
        alt=f"Bar chart: {caption} tagma against vLLM, {unit}",
        caption=f"{caption} Mean of the rounds; whiskers are one standard deviation.",
    )


_SERIES = {"tagma": "tagma", "vllm": "vLLM"}


def _label(scenario: Scenario) -> str:
    return scenario.name.partition("/")[2].replace("_", " ").replace("/", ", ")


def _time_bar(summary: Summary, scenario: Scenario) -> Bar:
    low = max(summary.mean - summary.sd, summary.minimum)
    text = quantity(summary.mean, scenario.unit)
    return Bar(summary.mean, low, summary.mean + summary.sd, text)


def _ratio_bar(scenario: Scenario) -> Bar | None:
    ratio = scenario.ratio
    if ratio is None:
        return None
    return Bar(ratio.median, ratio.p10, ratio.p90, f"{ratio.median:.2f}x")


def _spread(scenario: Scenario) -> str:
    ratio = None if scenario.target_is_limit else scenario.ratio
    return f"{ratio.p10:.2f}..{ratio.p90:.2f}" if ratio else ""


def _pair(scenario: Scenario) -> list[str]:
    return [
        quantity(scenario.variants[v].summary.median, scenario.unit)
        if v in scenario.variants
        else ""
        for v in _SERIES
    ]
