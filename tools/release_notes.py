"""The changelog's section of this version, as the text of a release.

    python3 tools/release_notes.py [--tag v0.2.0]

Fails if the section is not there or is empty, or if a tag names another version: the version is
kept in pyproject.toml alone. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class ReleaseError(Exception):
    """This tree cannot be released as it is; the message says what to change."""


def version(root: Path) -> str:
    """The version that this tree would be released as."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def notes(root: Path, tag: str) -> str:
    """The section of the version; ``tag`` may be empty, for a trial. Raises ReleaseError."""
    released = version(root)
    if tag and tag != f"v{released}":
        raise ReleaseError(
            f"the tag is {tag}, the version in pyproject.toml {released}: tag v{released}, or "
            f"change the version first"
        )
    lines = (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("## ")]
    for head, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        if lines[head].split()[1] == released:
            text = "\n".join(lines[head + 1 : end]).strip()
            if text:
                return text + "\n"
    raise ReleaseError(f"CHANGELOG.md has no section '## {released}' with text: write it first")


def main() -> int:
    """Print the notes; 1 with the reason if there are none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", default="", help="the tag that is being released; empty: a trial")
    try:
        print(notes(ROOT, parser.parse_args().tag), end="")
    except ReleaseError as error:
        print(f"release_notes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
