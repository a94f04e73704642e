"""Unpack vLLM's own tests, which its wheels leave out, for `make upstream`.

They come from the source distribution. pip refuses to hand one over before it has asked it for its
metadata, and that needs care: vLLM's build script asks for two build tools, names its version after
the device unless told otherwise ("+cpu" is not the release that was asked for), and would otherwise
pull a second torch into a build environment. The tools and what the tests themselves import go
into a folder of build/, so that .venv stays as it is.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from environment import Environment, hash_of

VERSION = "0.32.0"
COMPLETE = "complete"
SUFFIXES = (".py", ".txt", ".json", ".yaml")
# With what each requires, less what .venv has: pip is told to install no dependencies, or a second
# pytest would come along.
PACKAGES = (
    "tblib>=3",  # vLLM's conftest imports it
    "pytest-asyncio>=1",  # some tests of the engine are coroutines
    "setuptools-rust>=1.9",  # vLLM's build script imports it, also when asked for metadata only
    "semantic-version>=2.8",
    "setuptools-scm>=10",  # likewise
    "vcs-versioning>=2",
)
# The metadata is asked for with the version that pip expects and without a device to build for.
BUILD_ENV = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}


def folder(root: Path) -> Path:
    """Where `tests/` lies: put it on PYTHONPATH, the tests import each other as a package."""
    return root / "build" / "upstream" / f"vllm-{VERSION}"


def packages(root: Path) -> Path:
    """Where the packages lie that these tests alone need: put it on PYTHONPATH."""
    return root / "build" / "upstream" / "packages"


def is_ready(root: Path) -> bool:
    """True if tests and packages were unpacked, the packages that this file names."""
    try:
        text = (folder(root) / COMPLETE).read_text(encoding="utf-8")
    except OSError:
        return False
    return text.strip() == hash_of(PACKAGES)


def provide(environment: Environment) -> Path:
    """Download and unpack unless that was done; returns the folder. Raises SetupFailure."""
    root = environment.root
    target = folder(root)
    if is_ready(root):
        return target
    shutil.rmtree(packages(root), ignore_errors=True)
    command = ["install", "--no-deps", "--target", str(packages(root)), *PACKAGES]
    environment.pip(command, log_name="pip-upstream-packages", what="what vLLM's tests import")
    downloads = root / "build" / "upstream" / "sdist"
    shutil.rmtree(downloads, ignore_errors=True)
    command = ["download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    command += ["--dest", str(downloads), f"vllm=={VERSION}"]
    what = f"the source distribution of vLLM {VERSION}"
    extra = {**BUILD_ENV, "PYTHONPATH": str(packages(root))}
    environment.pip(command, log_name="pip-upstream-sdist", what=what, extra_env=extra)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    unpack(archive=next(downloads.glob("vllm-*.tar.gz")), target=partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    shutil.rmtree(downloads)
    return target


def unpack(*, archive: Path, target: Path) -> None:
    """Extract the text files of `tests/` from ``archive`` into ``target``, then mark it."""
    with tarfile.open(archive) as sources:
        for member in sources:
            # The first part is the archive's own folder.
            parts = Path(member.name).parts[1:]
            if not member.isfile() or parts[:1] != ("tests",) or ".." in parts:
                continue
            if not member.name.endswith(SUFFIXES):
                continue
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = sources.extractfile(member)
            assert stream is not None
            path.write_bytes(stream.read())
    (target / COMPLETE).write_text(f"{hash_of(PACKAGES)}\n", encoding="utf-8")
