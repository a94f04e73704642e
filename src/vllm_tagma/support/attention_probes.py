"""What the support matrix asks of a configuration with attention over ranges.

All are silent unless ``--attention-backend CUSTOM`` asks for it. How rules are joined:
``rule_table.py``.
"""

from __future__ import annotations

from typing import Any

from vllm_tagma import attention_backend
from vllm_tagma.support import config_probes as probe
from vllm_tagma.support.rule import Find

KV_DTYPES = ("auto", "float16", "bfloat16")
SMALLEST_HEAD = 32


def only_if_chosen(find: Find) -> Find:
    """``find``, where attention over ranges is asked for."""

    def found(config: Any) -> str | None:
        value = find(config) if attention_backend.chosen(config) else None
        return None if value is None else f"{attention_backend.NAME} with {value}"

    return found


def v1_runner(config: Any) -> str | None:
    return None if probe.attribute(config, "use_v2_model_runner") else "Model Runner V1"


def another_plugins(config: Any) -> str | None:
    owner = attention_backend.owner()
    return None if owner in (None, attention_backend.CLASS) else f"the class {owner}"


def kv_dtype(config: Any) -> str | None:
    found = probe.unless("cache_config.cache_dtype", *KV_DTYPES)(config)
    return None if found is None else f"--kv-cache-dtype {found}"


def head_size(config: Any) -> str | None:
    ask = probe.attribute(config, "model_config.get_head_size")
    size = ask() if callable(ask) else None
    small = isinstance(size, int) and size < SMALLEST_HEAD
    return f"heads of {size}" if small else None


def speculation(config: Any) -> str | None:
    method = probe.attribute(config, "speculative_config.method")
    return None if method is None else f"--speculative-config {method}"


def connector(config: Any) -> str | None:
    name = probe.attribute(config, "kv_transfer_config.kv_connector")
    return None if name is None else f"--kv-transfer-config {name}"


def mla(config: Any) -> str | None:
    return "MLA" if probe.attribute(config, "model_config.use_mla") else None


def windows(config: Any) -> str | None:
    found = probe.window_beside("attention_config")(config)
    return None if found is None else f"a sliding window of {found}"


def per_kind(config: Any) -> str | None:
    """Not only if chosen: this is the other way to choose."""
    kinds = probe.attribute(config, "attention_config.backend_per_kind") or {}
    ours = [k for k, b in kinds.items() if getattr(b, "name", b) == attention_backend.NAME]
    return f"{attention_backend.NAME} for {', '.join(ours)}" if ours else None
