"""Small traces as files, and a replay in this process: no engine, no model, no download."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

Write = Callable[[str], Path]
WriteBytes = Callable[[bytes], Path]


def zstd_compress(data: bytes) -> bytes:
    """As the standard library of Python 3.14 does it, or its backport."""
    for home in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(home).compress(data)  # type: ignore[no-any-return]
        except ModuleNotFoundError:
            continue
    raise AssertionError("the tests need backports.zstd: pip install 'vllm-tagma[bench]'")


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": gzip.compress,
    "zstd": zstd_compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a trace file and returns its path."""

    def write_file(text: str) -> Path:
        path = tmp_path / "trace.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def write_bytes(tmp_path: Path) -> WriteBytes:
    """As ``write``, for bytes."""

    def write_file(data: bytes) -> Path:
        path = tmp_path / "trace.bin"
        path.write_bytes(data)
        return path

    return write_file
