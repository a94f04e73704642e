"""Runs in a process of its own; see ``test_kernels.py``."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    """``cpu`` under the Triton interpreter, ``cuda`` natively."""
    return os.environ["TAGMA_KERNEL_DEVICE"]
