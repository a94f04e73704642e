"""The result file of ``tagma bench host``: its types, its version, reading and writing.

The format is documented in ``docs/bench-host.md``. A reader refuses a file of another major
version rather than guess; fields may be added within one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench.statistics import Summary, ratios_of, summarise

KIND = "tagma-bench-host"
SCHEMA_VERSION = 1

OURS = "tagma"


class ResultError(TagmaError, ValueError):
    """A file that is not a result of this benchmark, or of a version this release cannot read."""


@dataclass(kw_only=True)
class Variant:
    """One implementation in a scenario.

    ``rounds``: one value a round, in the scenario's unit. ``counters``: numbers beside the time,
    such as table loads per call.
    """

    rounds: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> Summary:
        """Mean, standard deviation, median, extremes of the rounds."""
        return summarise(self.rounds)


@dataclass(kw_only=True)
class Scenario:
    """What was measured, how, and the rounds of each variant.

    ``higher_is_better`` is set for rates. ``target``: the ratio that the project aims at, of
    ``baseline`` over ``ours`` (of ours over baseline for rates), or for ``target_is_limit`` the
    greatest value of ``ours``.
    """

    name: str
    group: str
    title: str
    unit: str
    iterations: int
    ours: str = OURS
    baseline: str | None = None
    higher_is_better: bool = False
    target: float | None = None
    target_is_limit: bool = False
    note: str = ""
    variants: dict[str, Variant] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Rounds measured."""
        return min((len(variant.rounds) for variant in self.variants.values()), default=0)

    @property
    def ratio(self) -> Summary | None:
        """How many times better ours is, round by round; None without a baseline."""
        if self.baseline is None or self.rounds == 0:
            return None
        ours = self.variants[self.ours].rounds
        baseline = self.variants[self.baseline].rounds
        pairs = (ours, baseline) if self.higher_is_better else (baseline, ours)
        return summarise(ratios_of(*pairs))

    @property
    def target_met(self) -> bool | None:
        """Whether the median reaches the target; None without one."""
        if self.target is None or self.rounds == 0:
            return None
        if self.target_is_limit:
            return self.variants[self.ours].summary.median <= self.target
        ratio = self.ratio
        return None if ratio is None else ratio.median >= self.target


@dataclass(kw_only=True)
class Result:
    """One run of the benchmark."""

    created: str
    command: str
    quick: bool
    seconds: float
    environment: dict[str, Any]
    scenarios: list[Scenario] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Scenario name to the reason why it was not measured."""
    source: str = ""
    """Where the result was read from; not part of the file."""

    def scenario(self, name: str) -> Scenario | None:
        """The scenario of that name, if it was measured."""
        return next((s for s in self.scenarios if s.name == name), None)


def to_json(result: Result) -> dict[str, Any]:
    """The document that :func:`write` writes: rounds, and the summaries derived from them."""
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "created": result.created,
        "command": result.command,
        "quick": result.quick,
        "seconds": result.seconds,
        "environment": result.environment,
        "scenarios": [_scenario_to_json(scenario) for scenario in result.scenarios],
        "skipped": result.skipped,
    }


def from_json(document: object, *, source: str = "the document") -> Result:
    """Reads a document. Summaries are computed anew from the rounds.

    Raises:
        ResultError: not a result, another schema version, or a field that is missing or of the
            wrong type; the message names it.
    """
    if not isinstance(document, Mapping) or document.get("kind") != KIND:
        raise ResultError(f"{source} is not a result of 'tagma bench host' (no kind={KIND!r})")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ResultError(
            f"{source} has schema_version {version!r}; this release reads {SCHEMA_VERSION}. "
            "Run the benchmark again, or read the file with the release that wrote it."
        )
    try:
        result = Result(
            created=_typed(document, "created", str),
            command=_typed(document, "command", str),
            quick=_typed(document, "quick", bool),
            seconds=float(_typed(document, "seconds", (int, float))),
            environment=dict(_typed(document, "environment", Mapping)),
            scenarios=[_scenario_from_json(s) for s in _typed(document, "scenarios", list)],
            skipped=dict(_typed(document, "skipped", Mapping)),
            source=source,
        )
    except ResultError as error:
        raise ResultError(f"{source}: {error}") from None
    return result


def write(result: Result, path: Path) -> None:
    """Writes the result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(to_json(result), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> Result:
    """Reads a result file. Raises :class:`ResultError`, also for a file that cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ResultError(f"{path} is not JSON: {error}") from None
    return from_json(document, source=str(path))


def _scenario_to_json(scenario: Scenario) -> dict[str, Any]:
    ratio = scenario.ratio
    return {
        "name": scenario.name,
        "group": scenario.group,
        "title": scenario.title,
        "unit": scenario.unit,
        "iterations": scenario.iterations,
        "ours": scenario.ours,
        "baseline": scenario.baseline,
        "higher_is_better": scenario.higher_is_better,
        "target": scenario.target,
        "target_is_limit": scenario.target_is_limit,
        "target_met": scenario.target_met,
        "note": scenario.note,
        "variants": {
            name: {
                "rounds": variant.rounds,
                "counters": variant.counters,
                "summary": variant.summary.to_json(),
            }
            for name, variant in scenario.variants.items()
        },
        "ratio": None if ratio is None else ratio.to_json(),
    }


def _scenario_from_json(document: object) -> Scenario:
    if not isinstance(document, Mapping):
        raise ResultError(f"a scenario must be an object, got {document!r}")
    name = _typed(document, "name", str)
    try:
        target = document.get("target")
        scenario = Scenario(
            name=name,
            group=_typed(document, "group", str),
            title=_typed(document, "title", str),
            unit=_typed(document, "unit", str),
            iterations=_typed(document, "iterations", int),
            ours=_typed(document, "ours", str),
            baseline=_typed(document, "baseline", (str, type(None))),
            higher_is_better=_typed(document, "higher_is_better", bool),
            target=None if target is None else float(_typed(document, "target", (int, float))),
            target_is_limit=_typed(document, "target_is_limit", bool),
            note=_typed(document, "note", str),
        )
        for variant, value in _typed(document, "variants", Mapping).items():
            scenario.variants[variant] = Variant(
                rounds=[float(x) for x in _numbers(value, "rounds")],
                counters=dict(_typed(value, "counters", Mapping)),
            )
        for role in (scenario.ours, scenario.baseline):
            if role is not None and role not in scenario.variants:
                raise ResultError(f"names the variant {role!r}, which is not in 'variants'")
    except ResultError as error:
        raise ResultError(f"scenario {name!r}: {error}") from None
    return scenario


def _numbers(document: Any, key: str) -> list[float]:
    values: list[float] = _typed(document, key, list)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ResultError(f"{key!r} holds {value!r}, which is not a number")
    if not values:
        raise ResultError(f"{key!r} is empty")
    return values


def _typed(document: Any, key: str, kind: Any) -> Any:
    if not isinstance(document, Mapping):
        raise ResultError(f"expected an object with {key!r}, got {document!r}")
    if key not in document:
        raise ResultError(f"the field {key!r} is missing")
    value = document[key]
    wrong_bool = isinstance(value, bool) and kind is not bool
    if not isinstance(value, kind) or wrong_bool:
        raise ResultError(f"the field {key!r} is {value!r}, which is of the wrong type")
    return value
