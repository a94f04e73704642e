"""The name under which vLLM knows our attention backend.

vLLM keeps one place for a backend from outside, ``CUSTOM``, whose class is a path. A name of our
own would be an enum member that a spawned process does not have yet when it unpickles the
configuration; ``CUSTOM`` is in the enum of every process.
"""

from __future__ import annotations

import sys
from typing import Any, Final

NAME: Final = "CUSTOM"
REGISTRY: Final = "vllm.v1.attention.backends.registry"
CLASS: Final = "vllm_tagma.integration.range_backend.RangeAttentionBackend"


def chosen(vllm_config: Any) -> bool:
    """Whether a configuration asks for ``CUSTOM``. Any object; imports nothing."""
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return getattr(backend, "name", backend) == NAME


def owner() -> str | None:
    """The class that ``CUSTOM`` stands for in this process, if any."""
    registry = sys.modules.get(REGISTRY)
    if registry is None:
        return None
    custom = getattr(registry.AttentionBackendEnum, NAME)
    return str(custom.get_path()) if custom.is_overridden() else None
