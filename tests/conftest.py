"""What one test leaves behind in the process and the next must not meet."""

from __future__ import annotations

import logging
import os

import pytest

_LEVEL = os.environ.get("VLLM_LOGGING_LEVEL")


@pytest.fixture(autouse=True)
def vllm_is_heard() -> None:
    """Our commands silence vLLM for their process, by its variable and on its logger. Where a test
    runs one in this process, later tests that listen to vLLM's logger would hear nothing."""
    if _LEVEL is None:
        os.environ.pop("VLLM_LOGGING_LEVEL", None)
    logger = logging.getLogger("vllm")
    for part in (logger, *logger.handlers):
        if part.level > logging.INFO:
            part.setLevel(_LEVEL or "INFO")
