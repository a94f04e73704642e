"""Runs in a process of its own; see ``test_kernels.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / name) for name in ("worker", "manager", "manager/differential")]

if os.environ.get("TRITON_INTERPRET") == "1":
    import bf16_dot

    bf16_dot.repair()


@pytest.fixture(scope="session")
def device() -> str:
    """``cpu`` under the Triton interpreter, ``cuda`` natively."""
    return os.environ["TAGMA_KERNEL_DEVICE"]
