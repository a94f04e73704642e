"""The KV-cache groups of a model, from its configuration alone: no weights, no download.

The kinds of the layers come from ``transformers``, which fills in what a ``config.json`` leaves to
its model type; how layers form groups is vLLM's own decision (``get_kv_cache_groups``).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_tagma.lab.replay.replay_settings import Footprint, SettingsError

_DTYPE = torch.bfloat16
_LAYOUT = "LBNHC"
"""Layer by layer, as most backends keep their caches."""
_FULL = ("full_attention", "attention")
_WINDOW = ("sliding_attention",)
_CHUNK = ("chunked_attention",)


def model_groups(model: Path, vllm_config: Any) -> list[KVCacheGroupSpec]:
    """The groups that vLLM builds for ``model``, a ``config.json`` or the folder with one.

    ``vllm_config`` decides the tokens of a block and whether layers with windows are kept apart
    from those without (``--disable-hybrid-kv-cache-manager``). Raises :class:`SettingsError` if
    there is no such file, it is no model's, or layers hold something other than keys and values.
    """
    config = _text_config(model)
    block_size = vllm_config.cache_config.block_size
    specs = {
        f"layers.{layer}": _spec(config, kind, block_size, model)
        for layer, kind in enumerate(_kinds(config))
    }
    cache = vllm_config.cache_config
    if getattr(cache, "kv_cache_layout", "") is None:  # vLLM asks attention backends for it
        cache.kv_cache_layout = _LAYOUT
    groups: list[KVCacheGroupSpec] = get_kv_cache_groups(vllm_config, specs)
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if sizes != {block_size}:
        raise SettingsError(
            f"--model {model}: vLLM gives its groups blocks of {sorted(sizes)} tokens, and a "
            "replay has blocks of one size. Give another model."
        )
    return groups


def group_name(group: KVCacheGroupSpec) -> str:
    """A group in a few words: "full, 10 layers", "window 1024, 8 layers"."""
    spec, layers = group.kv_cache_spec, len(group.layer_names)
    kind = "full"
    if isinstance(spec, SlidingWindowSpec):
        kind = f"window {spec.sliding_window}"
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        kind = f"chunks of {spec.attention_chunk_size}"
    elif isinstance(spec, MLAAttentionSpec):
        kind = "latent"
    return f"{kind}, {layers} layer{'' if layers == 1 else 's'}"


def group_regions(group: KVCacheGroupSpec) -> int:
    """Stretches of memory that hold a block of the group: keys and values of its layers."""
    return len(group.layer_names) * (1 if isinstance(group.kv_cache_spec, MLAAttentionSpec) else 2)


def footprint(groups: Sequence[KVCacheGroupSpec], vllm_config: Any) -> Footprint:
    """How many blocks a request holds in all groups once its prompt is computed."""
    limits: list[int | None] = []
    for group in groups:
        cap = getattr(group.kv_cache_spec, "max_admission_blocks_per_request", None)
        if cap is None:
            limits.append(None)
        else:  # what is in flight while the request decodes is one token
            limits.append(cap(1, vllm_config.model_config.max_model_len))
    return Footprint(tuple(limits))


def _text_config(model: Path) -> Any:
    from transformers import AutoConfig

    file = model / "config.json" if model.is_dir() else model
    if not file.is_file():
        raise SettingsError(f"--model {model}: there is no {file}. Give a model's config.json")
    try:
        with tempfile.TemporaryDirectory(prefix="tagma-replay-") as folder:
            shutil.copyfile(file, Path(folder) / "config.json")
            return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"--model {model} is no configuration that transformers knows: {error}"
        ) from None


def _kinds(config: Any) -> list[str]:
    """The kind of each layer that keeps keys and values of its own."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        window = getattr(config, "sliding_window", None)
        used = getattr(config, "use_sliding_window", True)
        kind = "sliding_attention" if window and used else "full_attention"
        kinds = [kind] * config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    return list(kinds)[: len(kinds) - shared]


def _spec(config: Any, kind: str, block_size: int, model: Path) -> Any:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    common = {"block_size": block_size, "num_kv_heads": heads, "dtype": _DTYPE}
    if latent := getattr(config, "kv_lora_rank", None):
        common["num_kv_heads"] = 1
        return MLAAttentionSpec(head_size=latent + config.qk_rope_head_dim, **common)
    if kind in _FULL:
        size = getattr(config, "global_head_dim", None) or size
        return FullAttentionSpec(head_size=size, **common)
    if kind in _WINDOW:
        return SlidingWindowSpec(head_size=size, sliding_window=config.sliding_window, **common)
    if kind in _CHUNK:
        chunk = config.attention_chunk_size
        return ChunkedLocalAttentionSpec(head_size=size, attention_chunk_size=chunk, **common)
    raise SettingsError(
        f"--model {model}: layers of the kind {kind} hold states, which a replay cannot follow. "
        "Give a model whose layers all have attention."
    )
