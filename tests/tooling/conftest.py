"""The scripts in tools/ are no package: `make` runs them by path, the tests import them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture
def progress(tmp_path: Path):
    """A Progress that logs below the test's folder."""
    from progress import Progress

    return Progress(total=9, log_dir=tmp_path / "logs")
