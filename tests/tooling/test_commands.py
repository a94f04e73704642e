"""The Makefile's promises: its targets, the order of `make test`, and the CI that calls it."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

TARGETS = (
    *("help", "serve", "test", "test-fast", "lint", "format", "cpp-test", "fuzz", "wheel"),
    *("docs", "pytest", "nightly", "env", "doctor", "drift", "clean", "distclean"),
)


def make(root, *words):
    result = subprocess.run(
        ["make", "--no-print-directory", *words], cwd=root, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_target_exists(root, target):
    make(root, "--dry-run", target)


def test_help_is_the_default_and_lists_the_commands(root):
    text = make(root)
    for word in ("make serve", "make test", "make doctor", "MODEL=", "PORT=", "ARGS="):
        assert word in text


def test_test_runs_the_cheapest_first_and_pytest_last(root):
    text = make(root, "--dry-run", "test")
    marks = [
        "ruff check",
        "ruff format --check",
        "mypy",
        "clang-format",
        "-m sphinx -W",
        "ctest",
        "prepare.py wheel",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert re.search(r"-m pytest -n \d+ --dist loadfile\s*$", text), (
        "pytest's closing line must be the last output"
    )


def test_sanitizers_are_on(root):
    assert "-DTAGMA_SANITIZE=ON" in make(root, "--dry-run", "cpp-test")


def test_ci_runs_make_test(root):
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text()
    assert ".ci/run" in workflow
    assert "tools/smoke_serve.py" in workflow
    assert "-m sphinx -W" in workflow


def test_ci_asks_for_vllms_newest_release_each_week(root):
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text()
    _, _, job = workflow.partition("  drift:")
    assert "make drift" in job
    assert re.search(r'schedule:\n +- cron: "\d+ \d+ \* \* \d"', workflow)
    assert "tools/drift.py --version '9.9'" in make(root, "--dry-run", "drift", "VERSION=9.9")


def test_the_long_runs_come_each_night(root):
    workflow = (root / ".github" / "workflows" / "nightly.yml").read_text()
    assert re.search(r'schedule:\n +- cron: "\d+ \d+ \* \* \*"', workflow)
    assert "make nightly" in workflow
    text = make(root, "--dry-run", "nightly", "SEED=7")
    marks = ["pool_fuzz --ops", "pool_soak --mode", "transfer_soak.py --operations 1000000"]
    marks += ["upstream_run.py", "load_run.py --minutes 60"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert text.count("--seed 7") >= 5
