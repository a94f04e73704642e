"""The last gate: who builds the manager by hand gets what is served, or the row that refuses."""

from __future__ import annotations

from typing import Any

import pytest
from kv_requests import cache_config, make_request

from vllm_tagma import support
from vllm_tagma.config import TagmaConfig
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.manager import TagmaKVCacheManager

BLOCK_SIZE = 4
RULES = {rule.id: rule for rule in support.rules()}


def build(**changes: Any) -> TagmaKVCacheManager:
    arguments = {
        "kv_cache_config": cache_config(num_blocks=11, block_size=BLOCK_SIZE),
        "max_model_len": 64,
        "scheduler_block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
    }
    return TagmaKVCacheManager(**{**arguments, **changes})


def two_sizes() -> Any:
    config = cache_config(num_blocks=11, block_size=BLOCK_SIZE)
    config.kv_cache_groups += cache_config(num_blocks=11, block_size=2 * BLOCK_SIZE).kv_cache_groups
    return config


@pytest.mark.parametrize(
    ("rule", "changes", "value"),
    [
        ("cache-groups", {"kv_cache_config": two_sizes()}, "is 2, with blocks of [4, 8] tokens."),
        ("cache-groups", {"scheduler_block_size": 8}, "scheduler_block_size is 8, not 4."),
        (
            "prefix-match-unit",
            {"hash_block_size": 2},
            "hash_block_size is 2 tokens with a block size of 4.",
        ),
        (
            "multi-module-mtp",
            {"num_prefill_lookahead": 3},
            "num_prefill_lookahead is 3, not 1.",
        ),
        (
            "decode-context-parallel",
            {"dcp_world_size": 2, "scheduler_block_size": 8},
            "dcp_world_size is 2, not 1.",
        ),
        ("prefill-context-parallel", {"pcp_world_size": 2}, "pcp_world_size is 2, not 1."),
        (
            "mamba",
            {"enable_mamba_shared_prefix_checkpoint": True},
            "enable_mamba_shared_prefix_checkpoint is True, not False.",
        ),
        ("alignment", {"tagma_config": TagmaConfig(alignment=2)}, "alignment is 2, not 1."),
    ],
)
def test_an_argument_is_refused_by_the_row_of_its_option(
    rule: str, changes: dict[str, Any], value: str
) -> None:
    with pytest.raises(UnsupportedError) as error:
        build(**changes)
    _assert_refusal(error.value, rule, value)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(UnsupportedError, match="vLLM passed surprise to its KV-cache manager"):
        build(surprise=1)


def test_without_caching_there_is_no_unit_of_hashing_to_match() -> None:
    assert build(hash_block_size=2, enable_caching=False).block_size == BLOCK_SIZE


@pytest.mark.parametrize(
    ("rule", "given"),
    [
        ("encoder-decoder", {"num_encoder_tokens": 7}),
    ],
)
def test_blocks_for_others_are_refused(rule: str, given: dict[str, Any]) -> None:
    manager = build()
    ((name, value),) = given.items()
    with pytest.raises(UnsupportedError) as error:
        manager.allocate_slots(make_request("r", list(range(8)), block_size=BLOCK_SIZE), 8, **given)
    _assert_refusal(error.value, rule, f"{name}={value}")


def _assert_refusal(error: UnsupportedError, rule: str, value: str) -> None:
    message = str(error)
    assert f"does not serve {RULES[rule].title}" in message
    assert value in message
    assert RULES[rule].why in message
    assert message.endswith(f"Way out: {RULES[rule].way_out}, or use --kv-cache-backend paged.")
