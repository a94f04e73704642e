"""Build the sdist and from it the wheel, and install that where nothing else is.

The wheel comes from the sdist, so a file that the sdist lacks shows here. It is audited for every
CPython from 3.11 on, and installed with its requirements into an empty environment of each that
this machine has. Neither vLLM nor torch may come along: they would go over the user's build.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from environment import Environment
from progress import CommandFailure, SetupFailure

TAG = "cp311-abi3"
OTHER_PYTHONS = ("python3.12", "python3.13", "python3.14")
VERSION = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
IMPORT = """
import importlib.util, sys
import vllm_tagma._native, vllm_tagma.lab._bench
for module in (vllm_tagma._native, vllm_tagma.lab._bench):
    assert module.__file__.startswith(sys.prefix), module.__file__
import vllm_tagma.cli, vllm_tagma.lab.lab_commands
from importlib import resources
for name in ("bench_serve/data/conversations.json", "replay/data/mixed.jsonl"):
    assert resources.files("vllm_tagma.lab").joinpath(name).is_file(), name
for name in ("vllm", "torch"):
    assert importlib.util.find_spec(name) is None, f"{name} was installed as a requirement"
pool = vllm_tagma._native.Pool(16)
assert pool.capacity == 15, pool.capacity
"""


def check(environment: Environment) -> list[str]:
    """Build and check; returns what was done, a line each.

    Raises SetupFailure with the end of the output.
    """
    root, progress, python = environment.root, environment.progress, environment.python
    output = root / "build" / "wheel"
    shutil.rmtree(output, ignore_errors=True)
    build: list[str | Path] = [python, "-m", "build", "--no-isolation", "--outdir", output, root]
    try:
        progress.run(build, log_name="wheel-build", env=environment.env)
        sdist, wheel = next(output.glob("*.tar.gz")), next(output.glob("*.whl"))
        if TAG not in wheel.name:
            raise SetupFailure(f"The wheel is named {wheel.name}, expected the tag {TAG} in it.")
        audit = environment.folder / "bin" / "abi3audit"
        command: list[str | Path] = [audit, "--strict", "--verbose", wheel]
        progress.run(command, log_name="wheel-abi3audit", env=environment.env)
        installed = []
        for version, interpreter in _pythons(environment):
            _install(environment, wheel, interpreter, folder=output / f"python{version}")
            installed.append(version)
    except CommandFailure as failure:
        raise SetupFailure(f"The wheel check failed: {failure}.\n{failure.tail()}") from failure
    return [f"{wheel.name} from {sdist.name}", f"installed on Python {', '.join(installed)}"]


def _pythons(environment: Environment) -> Iterator[tuple[str, str | Path]]:
    """Version and path of the environment's own interpreter, and of newer ones that work here."""
    found = set()
    others = [path for path in map(shutil.which, OTHER_PYTHONS) if path]
    interpreters: list[str | Path] = [environment.python, *others]
    for interpreter in interpreters:
        command: list[str | Path] = [interpreter, "-I", "-c", VERSION]
        try:
            version = environment.progress.run(command, log_name="wheel-python").strip()
        except CommandFailure:  # such as a shim of pyenv without a version behind it
            continue
        if version not in found:
            found.add(version)
            yield version, interpreter


def _install(environment: Environment, wheel: Path, interpreter: str | Path, folder: Path) -> None:
    """Install the wheel into an environment of its own and use it. Raises CommandFailure."""
    progress, name = environment.progress, folder.name
    # Isolated: neither PYTHONPATH nor the user's packages may stand in for a requirement.
    make: list[str | Path] = [interpreter, "-I", "-m", "venv", "--without-pip", folder]
    progress.run(make, log_name=f"wheel-{name}-venv")
    fresh = folder / "bin" / "python"
    pip: list[str | Path] = [environment.python, "-m", "pip", "--python", fresh, "install", wheel]
    progress.run(pip, log_name=f"wheel-{name}-install", env=environment.env)
    progress.run([fresh, "-I", "-c", IMPORT], log_name=f"wheel-{name}-import")
    progress.run([folder / "bin" / "tagma", "--help"], log_name=f"wheel-{name}-command")
