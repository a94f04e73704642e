"""Runs vLLM's own tests on stock vLLM and on this package, and compares with what is expected.

    .venv/bin/python tests/upstream/upstream_run.py [--jobs N] [--accept]        (make upstream)

The tests are those of vLLM's scheduler and KV-cache manager, unpacked by ``tools/prepare.py
upstream``. A test counts if it passes on stock vLLM here; stock results are kept until something
changes that they depend on. Ends with an error, and names the tests, if one is in another class
than ``expected.json`` says, or in none of the known ones. ``--accept`` writes the new classes and
``docs/upstream.md`` instead; it does not accept a difference that nobody has judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(HERE)]

import upstream_table as table  # noqa: E402
from upstream_classes import Observation  # noqa: E402
from upstream_hub import write_hub  # noqa: E402

import vllm_tests  # noqa: E402
from environment import hash_of  # noqa: E402
from progress import CommandFailure, Progress  # noqa: E402

BUILD = ROOT / "build" / "upstream"
# What builds a scheduler or a manager. Of vLLM's other tests those of connectors do so too, which
# are refused as a whole.
PATHS = (
    "tests/v1/core",
    "tests/v1/streaming_input",
    "tests/v1/engine/test_abort_final_step.py",
    "tests/v1/engine/test_admission_control.py",
    "tests/v1/engine/test_iteration_logging.py",
    "tests/v1/engine/test_kv_cache_group_metadata.py",
    "tests/v1/simple_kv_offload/test_scheduler.py",
    "tests/v1/spec_decode/test_dflash_lookahead.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/test_kv_cache_spec_registry.py",
)
SECONDS_PER_TEST = 300
PYTEST_INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"


def main() -> int:
    """Run, compare, report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument(
        "--accept", action="store_true", help="write expected.json and the document"
    )
    options = parser.parse_args()
    if not vllm_tests.is_ready(ROOT):
        print(
            "vLLM's tests are not in build/upstream: `python3 tools/prepare.py upstream` gets them"
        )
        return 1
    progress = Progress(total=2, log_dir=ROOT / "build" / "logs")
    with progress.step("vLLM's own tests on stock vLLM (which pass here?)"):
        stock = _stock(progress, jobs=options.jobs)
    with progress.step("the same tests on vllm-tagma"):
        results = BUILD / "tagma.jsonl"
        ours = run_tests(progress, backend="tagma", jobs=options.jobs, paths=PATHS, results=results)
    found = table.compare(stock=stock, ours=ours, judgements=table.read_judgements())
    print(table.summary(found))
    if options.accept:
        return _accept(found)
    complaints = table.complaints(found, table.read_expected())
    print("\n".join(complaints) if complaints else "every test is in the class that is expected")
    return 1 if complaints else 0


def run_tests(
    progress: Progress, *, backend: str, jobs: int, paths: tuple[str, ...], results: Path
) -> list[Observation]:
    """Run ``paths`` of vLLM's tests on a backend and return what was seen of each test.

    Failing tests are no error here. Raises CommandFailure if pytest itself did not get through.
    ``results`` is written on the way.
    """
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p"]
    command += ["no:cacheprovider", "--continue-on-collection-errors"]
    command += ["-p", "upstream_plugin", f"--upstream-backend={backend}"]
    command += [f"--upstream-results={results}", f"--timeout={SECONDS_PER_TEST}", *paths]
    if jobs > 1:
        command += ["-n", str(jobs), "--dist", "load"]
    folder = vllm_tests.folder(ROOT)
    # Their own configuration would be looked for upwards, where this repository's lies.
    (folder / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
    try:
        progress.run(
            command, log_name=f"upstream-{backend}", cwd=folder, env=environment_of(backend)
        )
    except CommandFailure as failure:
        if failure.status != 1 or not results.is_file():  # 1: some tests failed
            raise
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    if not lines or "finished" not in lines[-1]:
        raise SystemExit(f"pytest stopped early: see build/logs/upstream-{backend}.log")
    return [Observation(**line) for line in lines[:-1]]


def environment_of(backend: str, models: Path = BUILD / "models") -> dict[str, str]:
    """Environment variables of a run, whose models are written below ``models``."""
    paths = [vllm_tests.packages(ROOT), vllm_tests.folder(ROOT), HERE]
    plugins = "" if backend == "stock" else "tagma"
    dropped = ("TAGMA_", "VLLM_", "HF_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HOME": str(write_hub(models)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": plugins,
    }


def _stock(progress: Progress, *, jobs: int) -> list[Observation]:
    """The results of stock vLLM, from the last run if nothing has changed."""
    installed = "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'))"
    versions = subprocess.run(
        [sys.executable, "-c", installed], capture_output=True, text=True, check=True
    ).stdout
    models = (HERE / "upstream_hub.py").read_text(encoding="utf-8")
    key = hash_of([versions, vllm_tests.VERSION, *vllm_tests.PACKAGES, *PATHS, models])
    stamp, kept = BUILD / "stock.key", BUILD / "stock-kept.jsonl"
    if kept.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == key:
        progress.say("as in the last run")
        lines = kept.read_text(encoding="utf-8").splitlines()
        return [Observation(**json.loads(line)) for line in lines]
    results = BUILD / "stock.jsonl"
    seen = run_tests(progress, backend="stock", jobs=jobs, paths=PATHS, results=results)
    kept.write_text("".join(json.dumps(vars(test)) + "\n" for test in seen), encoding="utf-8")
    stamp.write_text(key, encoding="utf-8")
    return seen


def _accept(found: table.Comparison) -> int:
    if found.unjudged:
        print("not accepted: judge these in tests/upstream/judged.toml, or repair them")
        return 1
    table.write_expected(found)
    (ROOT / table.DOCUMENT).write_text(table.render(table.read_expected()), encoding="utf-8")
    print(f"written: {table.EXPECTED.relative_to(ROOT)} and {table.DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
