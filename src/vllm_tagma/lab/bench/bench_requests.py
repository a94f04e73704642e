"""vLLM's own requests, specs and managers, as the manager scenarios need them.

Block size 16 and the KV heads of an 8B model; 131,072 blocks hold 2.1 million tokens, the pool of
a large GPU. Block hashes are vLLM's.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from vllm_tagma.lab.bench.bench_timing import BenchError
from vllm_tagma.lab.bench.schema import OURS
from vllm_tagma.manager import TagmaKVCacheManager

BLOCK_SIZE = 16
NUM_BLOCKS = 131_072
MAX_MODEL_LEN = 262_144
VOCABULARY = 50_000

STOCK = "vllm"
MANAGERS: dict[str, Any] = {OURS: TagmaKVCacheManager, STOCK: KVCacheManager}
"""The managers compared, by the name of their variant."""


@functools.cache
def _hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_SIZE, sha256)


def cache_config(num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE) -> KVCacheConfig:
    """A cache of one full-attention group; no tensors, since nothing computes here."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )


def make_manager(variant: str, num_blocks: int = NUM_BLOCKS) -> Any:
    """An empty manager, prefix caching on, as vLLM's scheduler builds it."""
    return MANAGERS[variant](
        cache_config(num_blocks),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
    )


def random_tokens(count: int, seed: int) -> list[int]:
    """The same tokens for the same seed."""
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def make_request(name: str, tokens: list[int]) -> Request:
    """A waiting request; its full blocks are hashed here, as they are when vLLM adds it."""
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=100_000),
        pooling_params=None,
        block_hasher=_hasher(),
    )


def fresh_hashes(request: Request) -> None:
    """Gives the request equal hashes in new objects.

    A prompt that arrives is hashed anew, so its hashes are never the objects that the cache holds,
    and Python has not memorised their own hash yet.
    """
    request.block_hashes[:] = [bytes(bytearray(h)) for h in request.block_hashes]


def admit(manager: Any, request: Request) -> None:
    """Looks a waiting request up and allocates its whole prompt, as one scheduler step would."""
    request.status = RequestStatus.WAITING
    request.num_computed_tokens = 0
    blocks, computed, _ = manager.get_computed_blocks(request)
    tokens = request.num_tokens - computed
    if manager.allocate_slots(request, tokens, computed, blocks) is None:
        raise BenchError(f"the benchmark's pool is too small for {request.num_tokens} tokens")
    request.num_computed_tokens = request.num_tokens
    request.status = RequestStatus.RUNNING


def release(manager: Any, requests: Iterable[Request]) -> None:
    """Frees the requests and empties the prefix cache."""
    for request in requests:
        manager.free(request)
    if not manager.reset_prefix_cache():
        raise BenchError("the prefix cache was not reset: a request still holds blocks")
