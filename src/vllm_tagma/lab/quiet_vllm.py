"""vLLM as the laboratory's commands want it: no logs between their rows, no look-ups of models."""

from __future__ import annotations

import os


def quiet_vllm() -> None:
    """Set what vLLM reads when it is imported; to be called before. What the user set stays."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
