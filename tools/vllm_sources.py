"""Unpack the Python sources of vLLM 0.33 for the tests that compare against them.

The tests drive vLLM 0.33's own manager next to ours. Its wheel is a CUDA build of several hundred
megabytes, but the `.py` files import on top of the installed CPU build, so only they are kept.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

from environment import Environment

VERSION = "0.33.0"
COMPLETE = "complete"


def folder(root: Path) -> Path:
    """Where the sources lie: put it first on PYTHONPATH to import them."""
    return root / "build" / "vllm-0.33"


def is_ready(root: Path) -> bool:
    """True if the whole tree was unpacked."""
    return (folder(root) / COMPLETE).is_file()


def provide(environment: Environment) -> Path:
    """Download and unpack unless that was done; returns the folder. Raises SetupFailure."""
    target = folder(environment.root)
    if is_ready(environment.root):
        return target
    download(environment, version=VERSION, target=target)
    return target


def download(environment: Environment, *, version: str | None, target: Path) -> None:
    """Download a release, or the newest, and unpack it in place of ``target``.

    Raises SetupFailure.
    """
    downloads = target.with_name(f"{target.name}-wheel")
    shutil.rmtree(downloads, ignore_errors=True)
    wanted = f"vllm=={version}" if version else "vllm"
    command = ["download", "--no-deps", "--only-binary", "vllm", "--dest", str(downloads), wanted]
    environment.pip(command, log_name="pip-vllm-sources", what=f"the sources of {wanted}")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    unpack(wheel=next(downloads.glob("vllm-*.whl")), target=partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    shutil.rmtree(downloads)


def unpack(*, wheel: Path, target: Path) -> None:
    """Extract the ``.py`` files and the metadata of ``wheel`` into ``target``, then mark it."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, target)
    (target / COMPLETE).write_text(f"{wheel.name}\n", encoding="utf-8")
