"""What a test needs beside the package and vLLM, which ``make test`` provides."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest


def missing(message: str) -> NoReturn:
    """Skip the test that asks; in CI, where everything is provided, it fails."""
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def require_nixl() -> None:
    """Go on if NIXL is installed."""
    if importlib.util.find_spec("nixl") is None:
        missing("NIXL is not installed: `make test` does it, or pip install vllm-tagma[nixl]")
