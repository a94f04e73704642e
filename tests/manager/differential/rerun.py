"""Makes a failed seed say how to run it again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def seed_is_told(test: str, case: int | str, *, seed: int | None = None) -> Iterator[None]:
    """Adds the case, and the seed where that is not part of it, and a one-line command to whatever
    is raised inside."""
    try:
        yield
    except Exception as error:
        path = os.environ.get("PYTHONPATH")
        prefix = f"PYTHONPATH={path} " if path else ""
        error.add_note(
            f"seed {case if seed is None else seed}; rerun: {prefix}.venv/bin/python -m pytest "
            f"'tests/manager/differential/{test}[{case}]'"
        )
        raise
