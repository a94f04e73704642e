"""Has the newest vLLM release moved away from what this package leans on?

    python tools/drift.py [--version 0.34.0] [--accept]

Takes vLLM's newest release (or the one named) from the package index, unpacks its Python files, and
compares every seam (``integration/seams/``) with them. A release of a known series must fit. One of
a newer series must differ exactly as its file in ``docs/drift/`` says, so that a weekly run speaks
up when there is something to read and not about what has been read. ``--accept`` writes that file.

Exit status: 0 nothing new, 1 drift, 2 the release could not be had.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import vllm_sources
from environment import Environment
from progress import Progress, SetupFailure

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path("docs") / "drift"

# Runs in .venv, where the package is installed; prints one difference a line.
PROBE = """
import sys
from pathlib import Path
from vllm_tagma import versions
from vllm_tagma.integration import seams
root = Path(sys.argv[1])
version = versions.installed_vllm_version(root)
series = versions.series_of(version or "")
known = series in versions.KNOWN_VLLM_SERIES
print(version, "known" if known else "unknown")
against = version if known else versions.KNOWN_VLLM_SERIES[-1] + ".0"
print(*seams.check_seams(against, root=root), sep="\\n")
"""


def differences(python: Path, package: Path) -> tuple[str, bool, list[str]]:
    """Version of the ``vllm`` package at ``package``, whether its series is known, and the seams
    that do not fit it (for an unknown series: that differ from the newest known one), one a line.
    """
    run = subprocess.run(
        [python, "-c", PROBE, package], capture_output=True, text=True, check=True, cwd=ROOT
    )
    head, *lines = run.stdout.splitlines()
    version, known = head.split()
    return version, known == "known", [line for line in lines if line]


def verdict(version: str, known: bool, found: list[str], *, records: Path) -> list[str]:
    """What is new, as lines to print; empty if nothing is."""
    if known:
        return [f"vLLM {version} is of a known series and does not fit:", *found] if found else []
    record = record_of(version, records=records)
    if not record.is_file():
        return [f"vLLM {version} is new, no {record.name} in {RECORDS}:", *(found or ["(it fits)"])]
    expected = record.read_text(encoding="utf-8").splitlines()
    if expected == found:
        return []
    changes = difflib.unified_diff(expected, found, "recorded", version, lineterm="", n=0)
    return [f"vLLM {version} is not what {RECORDS / record.name} says:", *changes]


def record_of(version: str, *, records: Path) -> Path:
    """Where the differences of a release's series are written down."""
    series = ".".join(version.split(".")[:2])
    return records / f"vllm-{series}.txt"


def main() -> int:
    """Compare, and say what is new."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", help="a release of vLLM; default: the newest")
    parser.add_argument("--accept", action="store_true", help="write the differences down")
    given = parser.parse_args()
    environment = Environment(
        root=ROOT, progress=Progress(total=1, log_dir=ROOT / "build" / "logs"), cuda=False
    )
    target = ROOT / "build" / "vllm-drift"
    try:
        with environment.progress.step(f"sources of vLLM {given.version or '(newest)'}"):
            vllm_sources.download(environment, version=given.version, target=target)
    except SetupFailure as failure:
        print(failure, file=sys.stderr)
        return 2
    version, known, found = differences(environment.python, target / "vllm")
    shutil.rmtree(target)
    if given.accept and not known:
        record = record_of(version, records=ROOT / RECORDS)
        record.parent.mkdir(exist_ok=True)
        record.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
        print(f"vLLM {version}: {len(found)} differences written to {record.relative_to(ROOT)}")
        return 0
    new = verdict(version, known, found, records=ROOT / RECORDS)
    print("\n".join(new) or f"vLLM {version}: nothing new ({len(found)} known differences)")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
