"""Compares a run with ``expected.json`` and writes that file and ``docs/upstream.md``."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from upstream_classes import CLASSES, MEANINGS, Observation, Verdict, classify

import vllm_tests

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"
JUDGEMENTS = HERE / "judged.toml"
DOCUMENT = Path("docs") / "upstream.md"
_NOT_HERE = {
    "asks a model hub for weights": ("snapshot", "offline", "Engine core initialization"),
    "needs an accelerator": ("CUDA", "accelerator"),
    "names a model without a stand-in": ("validation error for ModelConfig",),
}
JUDGED = ("refused", "peeks", "ids", "documented")


@dataclass(frozen=True)
class Judgement:
    """What a person says of failures: which tests (shell patterns), which error (a regular
    expression for the reason of ``differs``), the class they are in, and why."""

    tests: tuple[str, ...]
    error: str
    name: str
    why: str

    def covers(self, test: str, verdict: Verdict) -> bool:
        """True for a test that fails in the way that was judged."""
        named = any(fnmatch.fnmatchcase(test, pattern) for pattern in self.tests)
        return named and re.search(self.error, verdict.reason) is not None


@dataclass
class Comparison:
    """A run: the class of each test that passes on stock, and what became of the others there."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    not_here: dict[str, str] = field(default_factory=dict)
    idle_judgements: list[Judgement] = field(default_factory=list)

    @property
    def unjudged(self) -> list[str]:
        """Tests that differ from stock vLLM and of which nobody has said why."""
        return [test for test, verdict in self.verdicts.items() if verdict.name == "differs"]


def read_judgements(path: Path = JUDGEMENTS) -> list[Judgement]:
    """The judgements in ``judged.toml``; raises ValueError for a class that is none."""
    found = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("judgement", []):
        judgement = Judgement(tuple(entry["tests"]), entry["error"], entry["class"], entry["why"])
        if judgement.name not in JUDGED:
            raise ValueError(f"{path.name}: class {judgement.name!r} is none of {JUDGED}")
        found.append(judgement)
    return found


def compare(
    *,
    stock: Iterable[Observation],
    ours: Iterable[Observation],
    judgements: Iterable[Judgement],
) -> Comparison:
    """The class of each test that passes on stock vLLM."""
    seen = {test.test: test for test in ours}
    idle = list(judgements)
    known = tuple(idle)
    found = Comparison()
    for test in stock:
        if test.outcome != "passed":
            found.not_here[test.test] = not_here(test)
            continue
        if test.test not in seen:
            found.verdicts[test.test] = Verdict("differs", "did not run on vllm-tagma")
            continue
        verdict = classify(seen[test.test])
        if verdict.name == "differs":
            for judgement in known:
                if judgement.covers(test.test, verdict):
                    verdict = Verdict(judgement.name, judgement.why)
                    idle = [other for other in idle if other is not judgement]
                    break
        found.verdicts[test.test] = verdict
    found.idle_judgements = idle
    return found


def not_here(test: Observation) -> str:
    """Why a test does not pass on stock vLLM here, in a few words."""
    error = test.error or {}
    message = f"{error.get('type', test.outcome)}: {error.get('message', '')}"
    for reason, signs in _NOT_HERE.items():
        if any(sign in message for sign in signs):
            return reason
    return message.removesuffix(": ")[:120]


def read_expected(path: Path = EXPECTED) -> Comparison:
    """The classes in ``expected.json``; empty if the file is not there yet."""
    found = Comparison()
    if not path.is_file():
        return found
    content = json.loads(path.read_text(encoding="utf-8"))
    for file, by_verdict in content["tests"].items():
        for label, names in by_verdict.items():
            name, _, reason = label.partition(": ")
            found.verdicts |= {f"{file}::{test}": Verdict(name, reason) for test in names}
    for reason, tests in content["not here"].items():
        found.not_here |= dict.fromkeys(tests, reason)
    return found


def write_expected(found: Comparison, path: Path = EXPECTED) -> None:
    """Write the classes of a run, by file, class and reason."""
    tests: dict[str, dict[str, list[str]]] = {}
    for test, verdict in sorted(found.verdicts.items()):
        file, _, name = test.partition("::")
        label = f"{verdict.name}: {verdict.reason}" if verdict.reason else verdict.name
        tests.setdefault(file, {}).setdefault(label, []).append(name)
    elsewhere: dict[str, list[str]] = {}
    for test, reason in sorted(found.not_here.items()):
        elsewhere.setdefault(reason, []).append(test)
    content = {"vllm": vllm_tests.VERSION, "tests": tests, "not here": elsewhere}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def complaints(found: Comparison, expected: Comparison) -> list[str]:
    """One line for each test in another class than expected, and for each that nobody judged.

    A test that does not pass on stock here is no complaint: machines differ. Nor is a reason in
    other words.
    """
    lines = []
    for test, verdict in found.verdicts.items():
        before = expected.verdicts.get(test)
        now = f"{verdict.name} ({verdict.reason})" if verdict.reason else verdict.name
        if before is not None and before.name != verdict.name:
            lines.append(f"{test}: was {before.name}, is {now}")
        elif verdict.name == "differs":
            lines.append(f"{test}: {now}")
    for judgement in found.idle_judgements:
        lines.append(f"judged.toml: nothing fails with {judgement.error!r} in {judgement.tests}")
    return lines


def summary(found: Comparison) -> str:
    """Counts by class, one line."""
    counts = Counter(verdict.name for verdict in found.verdicts.values())
    parts = [f"{counts[name]} {name}" for name in CLASSES if counts[name]]
    return (
        f"{len(found.verdicts)} tests pass on stock vLLM here ({len(found.not_here)} do not); "
        f"on vllm-tagma: {', '.join(parts)}"
    )


def render(expected: Comparison) -> str:
    """``docs/upstream.md``, from ``expected.json``."""
    verdicts = expected.verdicts
    counts = Counter(verdict.name for verdict in verdicts.values())
    shown = [name for name in CLASSES if counts[name]]
    lines = [
        "# vLLM's own tests on this package",
        "",
        "<!-- Written by `make upstream ACCEPT=1` from `tests/upstream/expected.json`; do not "
        "edit. -->",
        "",
        f"The tests of vLLM {vllm_tests.VERSION} for its scheduler and KV-cache manager, from "
        "its source distribution, run twice in the CPU environment of this repository: on stock "
        "vLLM, and with `TagmaKVCacheManager`, `TagmaScheduler` and `TagmaAsyncScheduler` under "
        "the names that the tests import. The laws of [invariants.md](invariants.md) are checked "
        "in every step of every scheduler and at the end of every test.",
        "",
        "    make upstream            # fails, and names the tests, if one changes its class",
        "    make upstream ACCEPT=1   # writes the new classes and this page",
        "",
        f"{len(verdicts)} tests pass on stock vLLM here. Of these, on vllm-tagma:",
        "",
        "| class | tests | meaning |",
        "|---|---|---|",
        *(f"| {name} | {counts[name]} | {MEANINGS[name]} |" for name in shown),
        "",
        "A difference that is none of these is a bug, and fails the target. What the tests with "
        "the class `untouched` show about vLLM they show with and without this package; most are "
        "about its memory planning and about parts of its own manager, which they build by hand.",
        "",
        "## By file",
        "",
        f"| file | {' | '.join(shown)} |",
        f"|---|{'---|' * len(shown)}",
        *_by_file(verdicts, shown),
    ]
    refused = Counter(
        part for v in verdicts.values() if v.name == "refused" for part in v.reason.split("; ")
    )
    lines += ["", "## Refused, by reason", ""]
    lines += ["A test that needs several of them counts in each.", ""]
    lines += ["| tests | what is refused |", "|---|---|"]
    ranked = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    lines += [f"| {count} | {_cell(reason)} |" for reason, count in ranked]
    for name, heading in (
        ("peeks", "Peeks, by what is read"),
        ("ids", "Block ids"),
        ("documented", "Documented differences"),
    ):
        if counts[name]:
            lines += ["", f"## {heading}", "", *_by_reason(verdicts, name)]
    if expected.not_here:
        reasons = Counter(expected.not_here.values())
        lines += ["", "## Not counted", ""]
        lines += [
            f"{len(expected.not_here)} tests do not pass on stock vLLM in this environment: "
            + "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
            + "."
        ]
    return "\n".join(lines) + "\n"


def _by_file(verdicts: Mapping[str, Verdict], shown: list[str]) -> list[str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test, verdict in verdicts.items():
        counts[test.partition("::")[0]][verdict.name] += 1
    return [
        f"| `{file.removeprefix('tests/')}` | {' | '.join(str(row[n] or '') for n in shown)} |"
        for file, row in sorted(counts.items())
    ]


def _by_reason(verdicts: Mapping[str, Verdict], name: str) -> list[str]:
    """One row a reason, with its tests; parameters of a test are counted, not listed."""
    tests: dict[str, Counter[str]] = defaultdict(Counter)
    for test, verdict in verdicts.items():
        if verdict.name == name:
            tests[verdict.reason][test.rpartition("/")[2].partition("[")[0]] += 1
    rows = []
    for reason, names in sorted(tests.items(), key=lambda item: (-item[1].total(), item[0])):
        listed = ", ".join(
            f"`{test}`" + (f" ({count})" if count > 1 else "") for test, count in names.items()
        )
        rows.append(f"| {names.total()} | {_cell(reason)} | {listed} |")
    return ["| tests | what | which |", "|---|---|---|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
