"""Build the wheel, prove that it fits every CPython from 3.11 on, and import it.

Runs after the environment is built. The import happens in an interpreter without site-packages'
.pth files, so that the editable install of the working tree cannot stand in for the wheel.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from environment import Environment
from progress import CommandFailure, SetupFailure

TAG = "cp311-abi3"
IMPORT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import vllm_tagma._native, vllm_tagma.lab._bench
for module in (vllm_tagma._native, vllm_tagma.lab._bench):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
import vllm_tagma.cli, vllm_tagma.lab.lab_commands
from importlib import resources
for name in ("bench_serve/data/conversations.json", "replay/data/mixed.jsonl"):
    assert resources.files("vllm_tagma.lab").joinpath(name).is_file(), name
"""


def check(environment: Environment) -> Path:
    """Build and check; returns the wheel. Raises SetupFailure with the end of the output."""
    root, progress, python = environment.root, environment.progress, environment.python
    output = root / "build" / "wheel"
    shutil.rmtree(output, ignore_errors=True)
    build_dir = root / "build" / "wheel-objects"
    build: list[str | Path] = [python, "-m", "build", "--wheel", "--no-isolation"]
    build += [f"--config-setting=build-dir={build_dir}", "--outdir", output, root]
    try:
        progress.run(build, log_name="wheel-build", env=environment.env)
        wheel = next(output.glob("*.whl"))
        if TAG not in wheel.name:
            raise SetupFailure(f"The wheel is named {wheel.name}, expected the tag {TAG} in it.")
        audit: list[str | Path] = [
            environment.folder / "bin" / "abi3audit",
            "--strict",
            "--verbose",
            wheel,
        ]
        progress.run(audit, log_name="wheel-abi3audit", env=environment.env)
        unpacked = output / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        site = environment.site_packages
        command: list[str | Path] = [python, "-I", "-S", "-c", IMPORT, unpacked, site]
        progress.run(command, log_name="wheel-import", env=environment.env)
    except CommandFailure as failure:
        raise SetupFailure(f"The wheel check failed: {failure}.\n{failure.tail()}") from failure
    return wheel
