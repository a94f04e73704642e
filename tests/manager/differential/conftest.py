"""Quiet logs: traces reset the prefix cache at any time, and vLLM warns when that is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)
