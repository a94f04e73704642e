"""A scheduler as vLLM's engine core builds it, without an engine, a model or a GPU.

The class comes from vLLM's own configuration, so ``paged`` runs vLLM's scheduler and ``tagma`` the
one that ``--kv-cache-backend tagma`` serves with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from vllm_tagma.config import BACKEND_KEY, OPTIONS_KEY, Backend
from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench.bench_requests import cache_config
from vllm_tagma.lab.bench.tiny_model import write_tiny_model
from vllm_tagma.lab.replay.replay_settings import Settings


class EngineError(TagmaError, RuntimeError):
    """vLLM cannot be configured on this machine."""


def build_config(backend: Backend, settings: Settings, *, max_model_len: int) -> Any:
    """vLLM's configuration for a replay, of a tiny model in place of the one that is meant.

    Raises :class:`EngineError` if vLLM's build fits no device of this machine, and what start-up
    raises: ``ConfigError`` for options that the backend does not know.
    """
    if not current_platform.device_type:
        raise EngineError(
            "vLLM finds no device here that its build is for, and makes no configuration without "
            "one. Use vLLM's CPU build, or a machine with a GPU; the replay computes on neither."
        )
    additional: dict[str, Any] = {BACKEND_KEY: backend}
    if backend == "tagma":
        additional[OPTIONS_KEY] = settings.tagma_options()
    with tempfile.TemporaryDirectory(prefix="tagma-replay-") as folder:
        write_tiny_model(Path(folder))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            hf_overrides={"max_position_embeddings": max_model_len},
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            watermark=settings.watermark,
            async_scheduling=False,
            additional_config=additional,
        ).create_engine_config()
    # The platform of this machine may allow no such block size; nothing computes here.
    config.cache_config.block_size = settings.block_size
    return config


def build_scheduler(
    backend: Backend,
    settings: Settings,
    *,
    num_blocks: int,
    max_model_len: int,
    groups: Sequence[KVCacheGroupSpec] = (),
) -> Any:
    """vLLM's scheduler with prefix caching on a pool of ``num_blocks``, which ``groups`` share (by
    default one, with full attention). Raises as :func:`build_config`."""
    config = build_config(backend, settings, max_model_len=max_model_len)
    config.cache_config.num_gpu_blocks = num_blocks
    cache = cache_config(num_blocks, settings.block_size)
    if groups:
        cache = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=list(groups)
        )
    kind = config.scheduler_config.get_scheduler_cls()
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=False,
        block_size=settings.block_size,
        hash_block_size=settings.block_size,
    )
