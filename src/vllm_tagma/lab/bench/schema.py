"""The result file of ``tagma bench host``: its types, its version, reading and writing.

The format is documented in ``docs/bench-host.md``. A reader refuses a file of another major
version rather than guess; fields may be added within one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab import json_file
from vllm_tagma.lab.bench.statistics import Summary, ratios_of, summarise

KIND = "tagma-bench-host"
SCHEMA_VERSION = 1

OURS = "tagma"


class ResultError(TagmaError, ValueError):
    """A file that is not a result of this benchmark, or of a version this release cannot read."""


class Variant(Struct, kw_only=True):
    """One implementation in a scenario.

    ``rounds``: one value a round, in the scenario's unit. ``counters``: numbers beside the time,
    such as table loads per call.
    """

    rounds: Annotated[list[float], Meta(min_length=1)]
    counters: dict[str, int | float] = field(default_factory=dict)

    @property
    def summary(self) -> Summary:
        """Mean, standard deviation, median, extremes of the rounds."""
        return summarise(self.rounds)


class Scenario(Struct, kw_only=True):
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
    variants: dict[str, Variant]

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


class Result(Struct, kw_only=True):
    """One run of the benchmark."""

    created: str
    command: str
    quick: bool
    seconds: float
    environment: dict[str, Any]
    scenarios: list[Scenario]
    skipped: dict[str, str]
    """Scenario name to the reason why it was not measured."""
    source: str = ""
    """Where the result was read from; not part of the file."""

    def scenario(self, name: str) -> Scenario | None:
        """The scenario of that name, if it was measured."""
        return next((s for s in self.scenarios if s.name == name), None)


FILE = json_file.FileKind(
    KIND, SCHEMA_VERSION, command="tagma bench host", schema=Result, error=ResultError
)


def to_json(result: Result) -> dict[str, Any]:
    """The document that :func:`write` writes: rounds, and the summaries derived from them."""
    document = FILE.document(result)
    del document["source"]
    for entry, scenario in zip(document["scenarios"], result.scenarios, strict=True):
        ratio = scenario.ratio
        entry["target_met"] = scenario.target_met
        entry["ratio"] = None if ratio is None else ratio._asdict()
        for name, variant in scenario.variants.items():
            entry["variants"][name]["summary"] = variant.summary._asdict()
    return document


def from_json(document: object, *, source: str = "the document") -> Result:
    """Reads a document. Summaries are computed anew from the rounds.

    Raises:
        ResultError: not a result, another schema version, or a field that is missing or wrong; the
            message has its path and value.
    """
    result = FILE.content(document, source=source)
    result.source = source
    for number, scenario in enumerate(result.scenarios):
        for role in ("ours", "baseline"):
            name = getattr(scenario, role)
            if name is not None and name not in scenario.variants:
                raise ResultError(
                    f"{source}: $.scenarios[{number}].{role} is {name!r}, which is not among its "
                    f"variants: {', '.join(scenario.variants)}"
                )
    return result


def write(result: Result, path: Path) -> None:
    """Writes the result, whole or not at all."""
    json_file.write(to_json(result), path)


def read(path: Path) -> Result:
    """Reads a result file. Raises :class:`ResultError`, also for a file that cannot be read."""
    return from_json(json_file.load(path, error=ResultError), source=str(path))
