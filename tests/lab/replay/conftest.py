"""Small traces as files, and a replay in this process: no engine, no model, no download."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a trace file and returns its path."""

    def write_file(text: str) -> Path:
        path = tmp_path / "trace.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file
