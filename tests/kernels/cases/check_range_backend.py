"""Around the attention backend: the rows that it is given, and what it refuses of a loaded model.

That its tokens are vLLM's is for ``tests/e2e/test_range_attention.py`` to show.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

if os.environ["TAGMA_KERNEL_DEVICE"] == "cpu":
    # What vLLM's CPU worker imports first: V2's buffers without pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from vllm_tagma.errors import InvariantError, UnsupportedError
from vllm_tagma.integration import range_backend
from vllm_tagma.integration.block_tables_v2 import TagmaBlockTables
from vllm_tagma.integration.range_backend import RangeAttentionBackend, RangeAttentionImpl

LAYER: dict[str, Any] = {
    "num_heads": 4,
    "head_size": 32,
    "scale": 0.2,
    "num_kv_heads": 2,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
}


def _tables(device: str) -> TagmaBlockTables:
    return TagmaBlockTables(
        keep_id_rows=False,
        audit=None,
        request_of=lambda row: None,
        block_sizes=[16, 32],
        max_num_reqs=6,
        max_num_batched_tokens=64,
        max_num_blocks_per_group=[8, 8],
        device=torch.device(device),
    )


def check_rows_follow_the_batch_at_one_address(device: str) -> None:
    """And the table of the group that is read by range is not expanded; that of the other is."""
    tables = _tables(device)
    rows = tables.read_by_range(1)
    assert rows.tolist() == [-1] * 6
    for row in (2, 4):
        tables.append_block_ids(row, ([row, row + 1], [row]), overwrite=True)
    tables.apply_staged_writes()
    index = torch.tensor([4, 2], device=device)
    found = tables.gather_block_tables(index, num_reqs_padded=4)
    assert rows.tolist() == [4, 2, -1, -1, -1, -1]
    assert found[0][:2, :2].tolist() == [[4, 5], [2, 3]]
    assert not found[1].any()
    tables.gather_block_tables(index[:1], num_reqs_padded=2)
    assert rows.tolist()[:2] == [4, -1]
    tables.get_dummy_block_tables(3)
    assert rows.tolist() == [-1] * 6
    assert tables.read_by_range(0).data_ptr() == rows.data_ptr()


def _runner(device: str, backends: list[type], *, asked: str | None) -> SimpleNamespace:
    builders: list[SimpleNamespace] = [SimpleNamespace(batch=None) for _ in backends]
    groups = [
        [SimpleNamespace(backend=backend, metadata_builders=[builder])]
        for backend, builder in zip(backends, builders, strict=True)
    ]
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=SimpleNamespace(name=asked)))
    return SimpleNamespace(vllm_config=config, attn_groups=groups, block_tables=_tables(device))


def check_each_group_is_given_its_rows(device: str) -> None:
    runner = _runner(device, [RangeAttentionBackend, RangeAttentionBackend], asked="CUSTOM")
    range_backend.attach(runner)
    batches = [group[0].metadata_builders[0].batch for group in runner.attn_groups]
    assert [(batch.group, batch.block_size) for batch in batches] == [(0, 16), (1, 32)]
    assert all(batch.tables is runner.block_tables.ranges.tables for batch in batches)


def check_another_backend_in_its_place_is_refused(device: str) -> None:
    """vLLM's CPU platform, for one, takes its own whatever is asked for."""
    runner = _runner(device, [RangeAttentionBackend, TritonAttentionBackend], asked="CUSTOM")
    with pytest.raises(UnsupportedError, match="vLLM took TRITON_ATTN for layers of cache group 1"):
        range_backend.attach(runner)
    range_backend.attach(_runner(device, [TritonAttentionBackend], asked="TRITON_ATTN"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of the type fp8"),
        ({"attn_type": "encoder_only"}, "attention of the kind encoder_only"),
        ({"sliding_window": 64, "chunk_lookback": 1}, "block-local attention"),
        ({"kv_sharing_target_layer_name": "x"}, "layers that share another's KV cache"),
    ],
)
def check_layers_that_it_does_not_serve(changes: dict[str, Any], says: str) -> None:
    assert RangeAttentionImpl(**LAYER).window == 0
    assert RangeAttentionImpl(**{**LAYER, "sliding_window": 64}).window == 64
    with pytest.raises(UnsupportedError, match=f"CUSTOM does not serve {says}"):
        RangeAttentionImpl(**{**LAYER, **changes})


def check_rows_that_count_other_blocks_are_refused(device: str) -> None:
    runner = _runner(device, [RangeAttentionBackend], asked="CUSTOM")
    range_backend.attach(runner)
    batch = runner.attn_groups[0][0].metadata_builders[0].batch
    layer, cache = RangeAttentionImpl(**LAYER), torch.zeros(4, 2, 32, 64, device=device)
    query = torch.zeros(1, 4, 32, device=device)
    step = SimpleNamespace(batch=batch, num_actual_tokens=1)
    with pytest.raises(InvariantError, match="blocks of 32 tokens and the rows of cache group 0"):
        layer.forward(torch.nn.Module(), query, query, query, cache, step, torch.zeros_like(query))
