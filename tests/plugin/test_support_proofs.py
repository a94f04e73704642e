"""Each served rule of the support matrix names tests that show it, and those tests run.

pytest itself collects the named files, so a test that was renamed, a parameter that is gone or a
file that cannot be imported is noticed; tests that are skipped or expected to fail prove nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_tagma import support
from vllm_tagma.support import Rule

ROOT = Path(__file__).parents[2]
SERVED = [rule for rule in support.rules() if rule.status == "served"]
_NO_PROOF = {"skip", "skipif", "xfail"}


def faults(rules: Iterable[Rule], collected: Collection[str]) -> list[str]:
    """What is wrong with the proofs of served rows. ``collected``: node ids, parameters included;
    a proof without parameters stands for all of a test's."""
    tests = {*collected, *(node.partition("[")[0] for node in collected)}
    found = []
    for rule in rules:
        if not rule.proof:
            found.append(f"{rule.id}: nothing shows it")
        for proof in rule.proof:
            path, _, name = proof.partition("::")
            if proof not in tests:
                found.append(f"{rule.id}: pytest does not collect {proof}")
            elif marks := _NO_PROOF & set(_marks(ROOT / path, name.partition("[")[0])):
                found.append(f"{rule.id}: {proof} is marked {', '.join(sorted(marks))}")
    return found


def _marks(path: Path, function: str) -> Iterator[str]:
    """Names of the marks of a test and of its module."""
    for node in ast.parse(path.read_text()).body:
        places: list[ast.expr] = []
        if isinstance(node, ast.FunctionDef) and node.name == function:
            places = node.decorator_list
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            places = [node.value]
        for place in places:
            for inner in ast.walk(place):
                if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "pytest.mark":
                    yield inner.attr


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Node ids of all tests in the files that proofs name."""
    files = sorted({proof.partition("::")[0] for rule in SERVED for proof in rule.proof})
    missing = [file for file in files if not (ROOT / file).is_file()]
    assert missing == []
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    return {line for line in run.stdout.splitlines() if line.startswith("tests/")}


@pytest.mark.slow
def test_every_served_row_is_shown_by_tests_that_run(collected: set[str]) -> None:
    assert faults(SERVED, collected) == []


@pytest.mark.slow
def test_a_row_without_a_test_is_noticed(collected: set[str]) -> None:
    rule = SERVED[0]
    (real, *_) = rule.proof
    assert faults([replace(rule, proof=())], collected) == [f"{rule.id}: nothing shows it"]
    for gone in (f"{real}_of_old", f"{real}[no-such-case]"):
        assert faults([replace(rule, proof=(real, gone))], collected) == [
            f"{rule.id}: pytest does not collect {gone}"
        ]


def test_a_skipped_test_shows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("@pytest.mark.skipif(True, reason='')\ndef test_a(): ...\ndef test_b(): ...\n")
    rule = replace(SERVED[0], id="x", proof=(f"{path}::test_a", f"{path}::test_b"))
    assert faults([rule], rule.proof) == [f"x: {path}::test_a is marked skipif"]


def test_rows_that_are_not_served_claim_no_proof() -> None:
    assert [r.id for r in support.rules() if r.status != "served" and r.proof] == []
