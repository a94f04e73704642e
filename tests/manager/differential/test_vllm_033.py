"""The same traces, and tests of prefix semantics, plugin and worker rows, against vLLM 0.33.

The Python files of 0.33 import on top of the installed CPU build of 0.32, whose compiled parts the
manager, the scheduler, the configuration and a worker's rows do not use; the worker's slot kernel
does, so its tests stay out. ``make test`` unpacks the files; ``TAGMA_VLLM033`` names the folder
with the package. The tests run in a process of their own, in which vLLM is 0.33.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prerequisites import missing

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("TAGMA_VLLM033", ROOT / "build" / "vllm-0.33"))
TESTS = (
    "tests/manager/differential/test_connector_traces.py",
    "tests/manager/differential/test_async_steps.py",
    "tests/manager/differential/test_group_rules.py",
    "tests/manager/differential/test_manager_traces.py",
    "tests/manager/differential/test_scheduler_traces.py",
    "tests/manager/test_prefix_semantics.py",
    "tests/manager/test_transfers.py",
    "tests/manager/test_user_complaints.py",
    "tests/plugin/test_finalise.py",
    "tests/plugin/test_keyword.py",
    "tests/plugin/test_scheduler.py",
    "tests/plugin/test_support.py",
    "tests/worker/test_scheduler_to_worker.py",
    "tests/plugin/test_support_connectors.py",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_holds_against_vllm_033(tmp_path: Path) -> None:
    if not (FOLDER / "vllm" / "__init__.py").is_file():
        message = (
            f"NOT TESTED against vLLM 0.33: no package `vllm` in {FOLDER}. Run `make test`, which "
            f"unpacks it, or set TAGMA_VLLM033 to the folder that holds it."
        )
        missing(message)
    environment = {k: v for k, v in os.environ.items() if k != "TAGMA_VLLM033"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_cpu_alias(tmp_path)), str(FOLDER)])
    probe = (
        "import vllm, vllm_tagma.versions as v; print(vllm.__file__, v.installed_vllm_version())"
    )
    told = _python(["-c", probe], environment).stdout.split()[-2:]
    assert told == [str(FOLDER / "vllm" / "__init__.py"), "0.33.0"]
    run = _python(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS], environment)
    tail = "\n".join(run.stdout.splitlines()[-60:])
    assert run.returncode == 0, f"against vLLM 0.33 in {FOLDER}:\n{tail}\n{run.stderr[-2000:]}"


def _cpu_alias(folder: Path) -> Path:
    """Metadata that says "cpu": vLLM chooses its platform by the version of its distribution, and
    the unpacked one is that of the CUDA build."""
    metadata = folder / "vllm-0.33.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
    return folder


def _python(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
