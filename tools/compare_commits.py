"""The host benchmark of two commits, by turns: is anything slower than before?

    python3 tools/compare_commits.py --base COMMIT [--rounds 6] [--scenarios manager/decode ...]

Each commit is built as a wheel from a clean checkout and installed in an environment of its own
that borrows vLLM from .venv; nothing of the working tree is measured but what is committed. Then
both run `tagma bench host`, one scenario after the other, in the order ABBA so that a drift of the
machine meets both alike. Of each scenario the table shows the ratio of the new commit's time to the
old one's: its median over the pairs of runs, and the lowest and highest pair. A scenario is slower
if the median is above the limit and no pair says otherwise. Exit status: 0 nothing slower, 1
something is, 2 wrong options or a failed build.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from environment import Environment
from progress import CommandFailure, Progress, SetupFailure

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "compare"
LIMIT = 1.03
"""Times above this ratio count as slower."""


class Build:
    """One commit, installed where it disturbs nothing."""

    def __init__(self, commit: str, *, environment: Environment) -> None:
        self.commit = commit
        self.folder = WORK / commit[:12]
        self.python = self.folder / "venv" / "bin" / "python"
        self._environment = environment

    def provide(self) -> None:
        """Check the commit out, build its wheel, install it. Raises SetupFailure."""
        if (self.folder / "complete").is_file():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        source = self.folder / "source"
        source.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", self.commit], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
        dist = self.folder / "dist"
        name = f"compare-{self.commit[:8]}"
        command = ["wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(dist)]
        self._environment.pip([*command, str(source)], log_name=name, what=f"{self.commit[:12]}")
        make = [sys.executable, "-m", "venv", "--without-pip", str(self.folder / "venv")]
        subprocess.run(make, check=True)
        packages = next((self.folder / "venv" / "lib").glob("python3.*")) / "site-packages"
        # A path in a .pth file is searched, but its own .pth files are not run: the editable
        # install of the working tree stays out.
        shared = self._environment.site_packages
        (packages / "vllm_of_the_tree.pth").write_text(f"{shared}\n", encoding="utf-8")
        wheel = next(dist.glob("*.whl"))
        command = ["--python", str(self.python), "install", "--no-deps", "--no-index"]
        install: list[str | Path] = [self._environment.python, "-m", "pip", *command, wheel]
        self._environment.progress.run(install, log_name=f"{name}-install")
        (self.folder / "complete").write_text(f"{self.commit}\n", encoding="utf-8")

    def measure(self, scenario: str, *, number: int, rounds: int) -> dict[str, float]:
        """Median times of ours by scenario name, in the unit of the scenario."""
        result = self.folder / "results" / f"{scenario.replace('/', '-')}-{number}.json"
        result.parent.mkdir(exist_ok=True)
        code = "import sys; from vllm_tagma.cli import main; sys.exit(main())"
        options = ["--only", scenario, "--rounds", str(rounds), "--json", str(result)]
        command: list[str | Path] = [self.python, "-c", code, "bench", "host", *options]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        log = f"compare-{self.commit[:8]}-run"
        self._environment.progress.run(command, log_name=log, cwd=self.folder, env=environment)
        found = {}
        for cell in json.loads(result.read_text(encoding="utf-8"))["scenarios"]:
            ours = cell["variants"].get(cell["ours"])
            if ours is not None:
                value = ours["summary"]["median"]
                found[cell["name"]] = 1.0 / value if cell["higher_is_better"] else value
        return found


def main(arguments: Sequence[str]) -> int:
    """Compare; returns the exit status."""
    options = _parse(arguments)
    progress = Progress(total=2 + len(options.scenarios), log_dir=ROOT / "build" / "logs")
    environment = Environment(root=ROOT, progress=progress, cuda=False)
    try:
        builds = [
            Build(_commit(name), environment=environment) for name in (options.base, options.head)
        ]
        for build in builds:
            with progress.step(f"build {build.commit[:12]}"):
                build.provide()
        pairs = _measure(builds, options, progress)
    except SetupFailure as failure:
        print(f"\nThe comparison failed.\n{failure}", file=sys.stderr)
        return 2
    except CommandFailure as failure:
        print(f"\n{failure}:\n{failure.tail()}", file=sys.stderr)
        return 2
    slower = _print_table(pairs, base=builds[0].commit, head=builds[1].commit)
    return 1 if slower else 0


def _measure(
    builds: Sequence[Build], options: argparse.Namespace, progress: Progress
) -> dict[str, list[tuple[float, float]]]:
    pairs: dict[str, list[tuple[float, float]]] = {}
    for scenario in options.scenarios:
        with progress.step(f"{scenario}: {options.pairs} pairs"):
            for number in range(options.pairs):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                times: list[dict[str, float]] = [{}, {}]
                for which in order:
                    times[which] = builds[which].measure(
                        scenario, number=number, rounds=options.rounds
                    )
                for name in times[0].keys() & times[1].keys():
                    pairs.setdefault(name, []).append((times[0][name], times[1][name]))
    return pairs


def _print_table(pairs: dict[str, list[tuple[float, float]]], *, base: str, head: str) -> int:
    print(
        f"\nTime of {head[:12]} over {base[:12]}; above {LIMIT:g} in every pair counts as slower."
    )
    print("\n| scenario | median | lowest | highest | pairs | |\n|---|---|---|---|---|---|")
    slower = 0
    for name, values in sorted(pairs.items()):
        ratios = sorted(new / old for old, new in values)
        median = statistics.median(ratios)
        verdict = ""
        if median > LIMIT and ratios[0] > 1.0:
            verdict, slower = "slower", slower + 1
        elif median < 1.0 / LIMIT and ratios[-1] < 1.0:
            verdict = "faster"
        figures = f"{median:.3f} | {ratios[0]:.3f} | {ratios[-1]:.3f} | {len(ratios)}"
        print(f"| {name} | {figures} | {verdict} |")
    print(f"\n{slower} of {len(pairs)} scenarios are slower.")
    return slower


def _commit(name: str) -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--verify", f"{name}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        raise SetupFailure(f"{name!r} is no commit of this repository: {found.stderr.strip()}")
    return found.stdout.strip()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0], allow_abbrev=False
    )
    parser.add_argument("--base", required=True, help="the older commit")
    parser.add_argument("--head", default="HEAD", help="the newer commit (default: HEAD)")
    parser.add_argument("--pairs", type=int, default=6, help="runs of each commit (default: 6)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds in a run (default: 8)")
    parser.add_argument(
        "--scenarios",
        nargs="+",
        default=["kv_allocator", "kv_slot_mapping", "manager", "scheduler"],
        help="names of `tagma bench host --list`, or parts of them",
    )
    options = parser.parse_args(arguments)
    if options.pairs < 2 or options.rounds < 1:
        parser.error("--pairs needs 2 or more, --rounds 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
