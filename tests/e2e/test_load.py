"""The long load in short: mixed clients on two ranks for half a minute, every check but the drift.

``make load`` runs it for an hour.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_load_leaves_nothing_behind_and_changes_no_token(
    engine_environment: dict[str, str], tmp_path: Path
) -> None:
    script, out = Path(__file__).with_name("load_run.py"), tmp_path / "load.json"
    # Half the pool of the hour: half a minute on a busy machine sees few requests, and some of them
    # are to be preempted.
    command = [sys.executable, str(script), "--minutes", "0.5", "--blocks", "160"]
    command += ["--seed", "1", "--samples", "16"]
    run = subprocess.run(
        [*command, "--out", str(out)],
        env=engine_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
        check=False,
    )
    assert out.exists(), run.stdout[-6000:]
    report = json.loads(out.read_text())
    failed = [found for found in report["checks"] if not found["passed"]]
    assert failed == [], run.stdout[-3000:]
    assert run.returncode == 0
    assert sum(report["counts"].values()) >= 60
    assert report["samples"]["count"] == 16
