"""Which sources the measured core was built from, and whether they are those of this tree.

A figure outlives the code that it was measured on. So the native module carries a digest of its
sources, CMake's work (``CMakeLists.txt``); a result carries it with the commit; and a report made
in another tree says that it is another core.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_tagma import _native

_PATTERNS: Final = ("csrc/tagma/*.hpp", "csrc/bindings/*.hpp", "csrc/bindings/*.cpp")
_CORE: Final = ("csrc/tagma", "csrc/bindings")
_HOST: Final = ("src/vllm_tagma", ":!src/vllm_tagma/lab", ":!*.pyi")
"""The Python side that is measured, as git's pathspecs."""


def compiled() -> str:
    """The digest that the loaded native module was built with."""
    return _native.__source__


def of_tree(root: Path) -> str | None:
    """The digest of the core's sources below ``root``; None where there are none. O(bytes)."""
    files = sorted(
        path.relative_to(root).as_posix() for pattern in _PATTERNS for path in root.glob(pattern)
    )
    if not files:
        return None
    lines = [f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n" for name in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tree() -> Path | None:
    """The source tree that this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[4]
    return root if (root / "csrc" / "tagma").is_dir() else None


def commit_of_core() -> str | None:
    """The last commit that changed the core's sources, if the loaded core was built from it."""
    root = tree()
    if root is None or of_tree(root) != compiled():
        return None
    if git(root, "status", "--porcelain", "--", *_CORE):
        return None
    return git(root, "log", "-1", "--format=%H", "--", *_CORE) or None


def differences(source: Mapping[str, Any], *, root: Path | None = None) -> list[str]:
    """In what a result's ``source`` is not this tree's code, a sentence each; empty if in nothing,
    or if there is no tree to compare with (``root``, by default the one that this runs from)."""
    root = root or tree()
    if root is None:
        return []
    found = []
    core, now = source.get("core"), of_tree(root)
    commit = source.get("commit")
    named = f" (commit {str(source.get('core_commit') or commit)[:12]})" if commit else ""
    if core is not None and core != now:
        found.append(f"The core that was measured{named} is not this tree's: measure again.")
    elif core is None and not (commit and git(root, "cat-file", "-t", commit) == "commit"):
        found.append("Which core was measured is not known: an older result, or no git here.")
    elif core is None and _changed(root, str(commit), _CORE):
        found.append(f"The core has changed since it was measured{named}: measure again.")
    if commit and _changed(root, commit, _HOST):
        found.append(
            f"The Python side has changed since it was measured (commit {commit[:12]}): the "
            f"manager's and scheduler's figures may be others today."
        )
    return found


def git(folder: Path, *arguments: str) -> str | None:
    """The output of git in ``folder``; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _changed(root: Path, commit: str, paths: tuple[str, ...]) -> bool:
    return bool(git(root, "diff", "--name-only", commit, "--", *paths))
