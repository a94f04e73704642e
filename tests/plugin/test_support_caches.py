"""The support matrix on KV-cache groups: every refused cache shows its message, and others pass.

The groups are made by hand, as vLLM would make them of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support_messages import RULES, assert_message
from vllm.v1 import kv_cache_interface as kv

from vllm_tagma import support
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.manager import TagmaKVCacheManager

if TYPE_CHECKING:
    from conftest import ConfigFactory


def full(**changes: Any) -> kv.FullAttentionSpec:
    base = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return kv.FullAttentionSpec(**{**base, **changes})


def cache_of(*specs: Any, group: dict[str, Any] | None = None, **changes: Any) -> kv.KVCacheConfig:
    groups = [
        kv.KVCacheGroupSpec(layer_names=[f"layer{i}"], kv_cache_spec=spec, **(group or {}))
        for i, spec in enumerate(specs)
    ]
    return kv.KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups, **changes)


def _windowed(**changes: Any) -> kv.SlidingWindowSpec:
    base = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return kv.SlidingWindowSpec(**{**base, "sliding_window": 128, **changes})


def _chunked(**changes: Any) -> kv.ChunkedLocalAttentionSpec:
    base = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return kv.ChunkedLocalAttentionSpec(**{**base, "attention_chunk_size": 64, **changes})


def _mla(**changes: Any) -> kv.MLAAttentionSpec:
    base = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    return kv.MLAAttentionSpec(**{**base, **changes})


def _mamba() -> kv.MambaSpec:
    return kv.MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))


def _cross() -> kv.CrossAttentionSpec:
    return kv.CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


def _sink() -> kv.SinkFullAttentionSpec:
    return kv.SinkFullAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sink_len=4
    )


CACHES: list[tuple[str, Callable[[], Any], str]] = [
    ("cache-groups", lambda: cache_of(), "number of cache groups of the model is 0"),
    (
        "cache-groups",
        lambda: cache_of(full(), _windowed(block_size=64)),
        "number of cache groups of the model is 2, with blocks of [32, 64] tokens",
    ),
    (
        "sparse-mla",
        lambda: cache_of(_mla(cache_role=kv.SparseCacheRole.INDEXER)),
        "is MLAAttentionSpec with cache_role=indexer",
    ),
    (
        "sparse-mla",
        lambda: cache_of(_mla(model_version="deepseek_v4")),
        "model_version=deepseek_v4",
    ),
    ("sparse-mla", lambda: cache_of(_mla(alignment=576)), "with alignment=576"),
    ("other-windows", lambda: cache_of(_chunked()), "is ChunkedLocalAttentionSpec in every layer"),
    (
        "other-windows",
        lambda: cache_of(full(), _chunked(attention_chunk_size=48)),
        "is ChunkedLocalAttentionSpec with chunks of 48 tokens and blocks of 32",
    ),
    (
        "other-windows",
        lambda: cache_of(_windowed(extra_retained_tokens=2)),
        "is SlidingWindowSpec with extra_retained_tokens=2",
    ),
    ("mamba", lambda: cache_of(_mamba()), "model architecture is MambaSpec"),
    ("zeroing", lambda: cache_of(_mamba()), "zeroing of new blocks is required"),
    ("cross-attention", lambda: cache_of(_cross()), "is CrossAttentionSpec"),
    ("other-attention", lambda: cache_of(_sink()), "is SinkFullAttentionSpec"),
    ("other-attention", lambda: cache_of(full(non_causal=True)), "non_causal=True"),
    (
        "other-attention",
        lambda: cache_of(full(tokens_per_state=Fraction(1, 2))),
        "tokens_per_state=1/2",
    ),
    (
        "special-group",
        lambda: cache_of(full(), group={"role": kv.KVCacheGroupRole.HISPARSE_SOURCE}),
        "cache group of the model is role=hisparse_source",
    ),
    (
        "special-group",
        lambda: cache_of(full(), group={"host_resident": True}),
        "is host_resident=True",
    ),
    (
        "special-group",
        lambda: cache_of(full(), hisparse_host_num_blocks=8),
        "is hisparse_host_num_blocks=8",
    ),
    (
        "prefix-match-unit",
        lambda: cache_of(full(), hash_block_size=16),
        "--prefix-match-unit is 16 tokens with a block size of 32",
    ),
    (
        "retention-interval",
        lambda: cache_of(full(), prefix_cache_retention_interval=64),
        "--prefix-cache-retention-interval is 64",
    ),
]


@pytest.mark.parametrize(("rule_id", "make", "value"), CACHES)
def test_cache_groups_are_refused(
    vllm_config: ConfigFactory, rule_id: str, make: Callable[[], Any], value: str
) -> None:
    assert_message(support.explain(vllm_config(), make()), rule_id, value)


def test_a_refusal_from_the_cache_stops_too(vllm_config: ConfigFactory) -> None:
    with pytest.raises(UnsupportedError, match="SinkFullAttentionSpec"):
        support.require_supported(vllm_config(), cache_of(_sink()))


def test_these_caches_are_served() -> None:
    """Latent vectors; layers with windows that keep all their blocks, or let go of them."""
    for specs in (
        (_mla(),),
        (full(sliding_window=64),),
        (full(attention_chunk_size=64),),
        (_windowed(),),
        (_windowed(), full(), _windowed(sliding_window=64)),
        (_chunked(), full()),
    ):
        assert support.explain(None, cache_of(*specs)) == []
    kept = cache_of(_windowed(), prefix_cache_retention_interval=64)
    assert support.explain(None, kept) == []


@pytest.mark.parametrize(("rule_id", "cache", "value"), CACHES)
def test_a_manager_built_by_hand_is_refused_too(
    rule_id: str, cache: Callable[[], Any], value: str
) -> None:
    with pytest.raises(UnsupportedError) as error:
        _manager(cache())
    assert RULES[rule_id].message("|").partition("|")[0] in str(error.value)
    assert value in str(error.value)


def test_a_retention_interval_raises_as_in_vllm_unless_it_is_0() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    for kind in (KVCacheManager, TagmaKVCacheManager):
        with pytest.raises(ValueError, match="no sliding-window or Mamba"):
            _manager(cache_of(full(), prefix_cache_retention_interval=64), kind)
        assert _manager(cache_of(full(), prefix_cache_retention_interval=0), kind)


def _manager(cache: kv.KVCacheConfig, kind: type = TagmaKVCacheManager) -> Any:
    return kind(cache, max_model_len=256, scheduler_block_size=32, hash_block_size=32)
