"""vLLM's schedulers on both managers, as an engine builds them, of a model that is never loaded.

``_StockMixin`` applies to stock what ours does about vLLM #57580, as ``manager_pair`` explains.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

from kv_requests import cache_config, cap_is_far, groups_pass, mode_of, slack_is
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_tagma.integration.scheduler import TagmaAsyncScheduler, TagmaScheduler

DRAFTS = 3
_LIMITS = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 64}
_LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 1024,
"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false}"""


def engine_config(folder: Path, backend: str, *, speculation: str = "") -> VllmConfig:
    """A configuration as ``vllm serve --kv-cache-backend`` makes it, of a model that is never
    loaded. ``speculation``: a method; draft models and heads are never loaded either."""
    (folder / "config.json").write_text(_LLAMA)
    drafts: dict[str, Any] = {}
    if speculation:
        source = {"prompt_lookup_max": 3} if speculation == "ngram" else {"model": str(folder)}
        drafts = {"method": speculation, "num_speculative_tokens": DRAFTS, **source}
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        block_size=32,
        additional_config={"kv_cache_backend": backend},
        **({"speculative_config": drafts} if drafts else {}),
        **_LIMITS,
    ).create_engine_config()


class _StockMixin:
    """Withdraws what a request published in the step that preempts it (vLLM #57580)."""

    _published_before: list[dict[str, int]] | None = None  # by group
    withdrawn = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._published_before = [dict(manager.num_cached_block) for manager in managers]
        output = super().schedule(*args, **kwargs)
        self._published_before = None
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._published_before is not None:
            rows = self.kv_cache_manager.get_blocks(request.request_id).blocks
            for row, before in zip(rows, self._published_before, strict=True):
                for block in row[before.get(request.request_id, 0) :]:
                    if block.block_hash is not None:
                        self.withdrawn += 1
                        self.kv_cache_manager.evict_blocks({block.block_id})
        super()._preempt_request(request, *args, **kwargs)


class StockScheduler(_StockMixin, Scheduler):
    pass


class StockAsyncScheduler(_StockMixin, AsyncScheduler):
    pass


def build_scheduler(
    kind: type[Any],
    config: VllmConfig,
    *,
    num_blocks: int,
    block_size: int,
    caching: bool = True,
    mode: str = "default",
    transfer: KVTransferConfig | None = None,
    groups: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A scheduler on a pool of that size. ``settings`` are fields of vLLM's scheduler config; the
    model is as long as the pool, or 256 tokens. ``mode`` is for our scheduler, see ``mode_of``.
    ``groups``: windows and retention, see ``cache_config``."""
    groups = groups or {}
    num_groups = len(groups.get("windows", (None,)))
    config = copy.copy(config)
    config.kv_transfer_config = transfer
    options, slack = mode_of(mode)
    if issubclass(kind, (TagmaScheduler, TagmaAsyncScheduler)):
        tagma = {"compaction": options.compaction, "copy_budget": options.copy_budget}
        config.additional_config = {**config.additional_config, "tagma": tagma}
    config.scheduler_config = copy.copy(config.scheduler_config)
    for name, value in settings.items():
        assert hasattr(config.scheduler_config, name)
        setattr(config.scheduler_config, name, value)
    config.scheduler_config.max_num_scheduled_tokens = None
    if transfer is not None:  # as vLLM sets it for most connectors
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = min(
        _LIMITS["max_model_len"], (num_blocks - 1) // num_groups * block_size
    )
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.enable_prefix_caching = caching
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    cap = cap_is_far() if num_groups > 1 else contextlib.nullcontext()
    with slack_is(slack), groups_pass(), cap:
        return kind(
            config,
            cache_config(num_blocks=num_blocks, block_size=block_size, **groups),
            StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
        )
