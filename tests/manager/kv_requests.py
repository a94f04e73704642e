"""Real vLLM requests and managers, small enough to drive by hand.

Shared by the tests of the manager. Nothing here stands in for vLLM: requests, hashes, specs and the
stock manager are vLLM's own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_tagma import core_pool
from vllm_tagma._native import Pool
from vllm_tagma.config import TagmaConfig
from vllm_tagma.manager import TagmaKVCacheManager
from vllm_tagma.support import gates

init_none_hash(sha256)


@functools.cache
def block_hasher(block_size: int, lookahead: int = 0) -> Any:
    """vLLM's own hasher of full blocks. ``lookahead``: tokens behind a block that its hash covers,
    which vLLM 0.32 does not know."""
    return get_request_block_hasher(block_size, sha256, *((lookahead,) if lookahead else ()))


def make_request(
    request_id: str,
    tokens: list[int],
    *,
    block_size: int,
    max_tokens: int = 1_000,
    lora: str | None = None,
    salt: str | None = None,
    images: tuple[tuple[str, int, int], ...] = (),
    priority: int = 0,
    arrival: float = 0.0,
    skip_reading: bool | None = None,
    report_mode: str | None = None,
    session_id: str | None = None,
    hash_lookahead: int = 0,
) -> Request:
    """A waiting request. ``images`` holds (identifier, first position, length) each."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            skip_reading_prefix_cache=skip_reading,
            extra_args={"kv_cache_report_mode": report_mode} if report_mode else None,
        ),
        pooling_params=None,
        arrival_time=arrival,
        priority=priority,
        cache_salt=salt,
        session_id=session_id,
        lora_request=LoRARequest(lora, 1 + sum(map(ord, lora)), f"/adapters/{lora}")
        if lora
        else None,
        mm_features=[
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=identifier,
                mm_position=PlaceholderRange(offset=offset, length=length),
            )
            for identifier, offset, length in images
        ],
        block_hasher=block_hasher(block_size, hash_lookahead),
    )


def cache_config(
    *,
    num_blocks: int,
    block_size: int,
    windows: Sequence[int | None] = (None,),
    retention: int | None = None,
) -> KVCacheConfig:
    """A group for each of ``windows``, by default one full-attention group. A window in tokens is a
    sliding one, or, below 0, a chunk of local attention; None is full attention. ``num_blocks``
    counts the null block. ``retention``: vLLM's interval, in tokens."""
    common: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": torch.float32,
    }
    specs = [
        FullAttentionSpec(**common)
        if window is None
        else SlidingWindowSpec(**common, sliding_window=window)
        if window > 0
        else ChunkedLocalAttentionSpec(**common, attention_chunk_size=-window)
        for window in windows
    ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{i}" if i else "layer"], spec) for i, spec in enumerate(specs)
        ],
        prefix_cache_retention_interval=retention,
    )


@contextlib.contextmanager
def cap_is_far() -> Iterator[None]:
    """Pools that are made inside let rows have so many ranges that tiny blocks in many groups do
    not reach the cap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_pool, "Pool", functools.partial(Pool, max_ranges=8_192))
        yield


@contextlib.contextmanager
def groups_pass() -> Iterator[None]:
    """Inside, the gates let windows and several groups pass, whether they are served or not."""
    passing = ("sliding-window", "cache-groups", "retention-interval")
    with pytest.MonkeyPatch.context() as patch:
        rules = tuple(rule for rule in gates.RULES if rule.id not in passing)
        patch.setattr(gates, "RULES", rules)
        yield


_MODES = {
    "exact": (TagmaConfig(compaction="off"), 0.0),
    "idle": (TagmaConfig(compaction="idle", copy_budget=65_536), 0.0),
    "moving": (TagmaConfig(compaction="live", copy_budget=65_536), 0.0),
    "default": (TagmaConfig(), None),
}


def mode_of(name: str) -> tuple[TagmaConfig, float | None]:
    """Options, and as a share of the pool how many idle blocks may be evicted before their turn
    (None leaves it as it is).

    "exact", "idle" and "moving" evict what stock evicts: no slack, and moves are never short.
    Others are written as compaction/copy_budget/slack.
    """
    if name in _MODES:
        return _MODES[name]
    compaction, budget, slack = name.split("/")
    return TagmaConfig(compaction=compaction, copy_budget=int(budget)), float(slack)


def mode_options(name: str) -> dict[str, Any]:
    """What :func:`make_manager` takes for a mode."""
    config, slack = mode_of(name)
    return {"tagma_config": config, "slack": slack}


@contextlib.contextmanager
def slack_is(share: float | None) -> Iterator[None]:
    """Managers that are built inside have that slack."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLACK_WITH_MOVES", "MOST_SLACK_WITH_MOVES", "SLACK_WITHOUT_MOVES"):
            if share is not None:
                patch.setattr(core_pool, name, share)
        yield


def make_manager(
    kind: type[Any] = TagmaKVCacheManager,
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_model_len: int = 1 << 20,
    windows: Sequence[int | None] = (None,),
    retention: int | None = None,
    slack: float | None = None,
    **options: Any,
) -> Any:
    """A manager of that class, built as vLLM's scheduler builds it. Groups: :func:`cache_config`;
    windows pass the gates, and several groups do not come near the cap of ranges."""
    cap = cap_is_far() if len(windows) > 1 else contextlib.nullcontext()
    with slack_is(slack), groups_pass(), cap:
        return kind(
            kv_cache_config=cache_config(
                num_blocks=num_blocks, block_size=block_size, windows=windows, retention=retention
            ),
            max_model_len=max_model_len,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            **options,
        )


def make_stock(**options: Any) -> KVCacheManager:
    """vLLM's manager, with the options of :func:`make_manager`."""
    return make_manager(KVCacheManager, **options)


def ids_of(blocks: Any) -> list[int]:
    """Block ids of a result of either manager, of its one group."""
    (ids,) = blocks.get_block_ids()
    return ids


def nulls_of(blocks: Any) -> list[list[bool]]:
    """For each group, which blocks of a result of either manager are null."""
    return [[block == 0 for block in ids] for ids in blocks.get_block_ids()]


def real_ids_of(blocks: Any) -> list[int]:
    """Ids of the blocks that are not null, group by group."""
    return [block for ids in blocks.get_block_ids() for block in ids if block]


def row_of(manager: Any, request: Request) -> list[int]:
    """Block ids of a request's row."""
    return ids_of(manager.get_blocks(request.request_id))


def admit(manager: Any, request: Request, num_tokens: int | None = None, **options: Any) -> Any:
    """Looks a waiting request up and admits it, as the scheduler does.

    Computes ``num_tokens`` of it, by default all that is not cached. Returns (new blocks or None,
    hit length); on success the request runs and its tokens count as computed.
    """
    hit, length, _ = manager.get_computed_blocks(request)
    if num_tokens is None:
        num_tokens = request.num_tokens - length
    options.setdefault("full_sequence_must_fit", True)
    new = manager.allocate_slots(
        request,
        num_tokens,
        num_new_computed_tokens=length,
        new_computed_blocks=hit,
        **options,
    )
    if new is not None:
        request.status = request.status.RUNNING
        request.num_computed_tokens = length + num_tokens
    return new, length


def decode(manager: Any, request: Request, token: int, **options: Any) -> Any:
    """Appends an output token and gives it a slot; returns the new blocks or None."""
    request.append_output_token_ids(token)
    new = manager.allocate_slots(request, 1, **options)
    if new is not None:
        request.num_computed_tokens += 1
    return new


def event_keys(request: Request) -> list[Any]:
    """The request's block hashes as KV events carry them."""
    return [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes]


class ResidentSet:
    """What a consumer of the event stream believes is cached: hash -> number of blocks."""

    def __init__(self) -> None:
        self.count: collections.Counter[Any] = collections.Counter()

    def replay(self, events: list[Any]) -> None:
        """Applies events in order; a removal of something that is not resident fails."""
        for event in events:
            if isinstance(event, BlockStored):
                self.count.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    assert self.count[key] > 0, f"removed but not resident: {key!r}"
                    self.count[key] -= 1
            else:
                assert isinstance(event, AllBlocksCleared)
                self.count.clear()
        self.count += collections.Counter()  # drop zeros
