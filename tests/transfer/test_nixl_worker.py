"""Our workers name blocks; turned into indices these are vLLM's own."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnectorWorker

from vllm_tagma.integration.transfer.nixl_connectors import (
    TagmaNixlPullWorker,
    TagmaNixlPushWorker,
)

REGIONS, BLOCKS = 4, 100


def bare(worker_type, **attributes):
    """A worker with what the computation of indices reads, and no memory."""
    worker = worker_type.__new__(worker_type)
    worker.__dict__.update(
        _has_mamba=False,
        num_regions=REGIONS,
        block_len_per_layer=[8] * REGIONS,
        region_group_ids=[0] * REGIONS,
        _uses_region_group_mapping=False,
        _transfer_layer_group_ids=[],
        shutdown=lambda: None,
    )
    worker.__dict__.update(attributes)
    return worker


CASES = {
    "one group": ({}, [[5, 6, 7, 40]]),
    "groups that share their regions": ({}, [[5, 6], [40, 41, 42]]),
    "groups with regions of their own": (
        {"region_group_ids": [0, 1, 0, 1], "_uses_region_group_mapping": True},
        [[5, 6], [40, 41, 42]],
    ),
    "a group without blocks": (
        {"region_group_ids": [0, 1, 0, 1], "_uses_region_group_mapping": True},
        [[], [40, 41, 42]],
    ),
    "layers by name": ({"_transfer_layer_group_ids": [0, 1, 1, 0]}, [[5, 6], [40, 41, 42]]),
}


@pytest.mark.parametrize("worker_type", [TagmaNixlPullWorker, TagmaNixlPushWorker])
@pytest.mark.parametrize("ratio", [None, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blocks_stand_for_the_indices_of_vllm(worker_type, ratio, case):
    attributes, block_ids = case
    arguments = {
        "block_ids": block_ids,
        "dst_num_blocks": BLOCKS,
        "block_size_ratio": ratio,
        "physical_blocks_per_logical": 1,
    }
    stock = bare(NixlPullConnectorWorker, **attributes)._compute_desc_ids(**arguments)
    ours = bare(worker_type, **attributes)._compute_desc_ids(**arguments)
    assert np.array_equal(np.asarray(ours), stock)
    assert len(ours) == len(stock)
    named = [(offsets[:, None] + ids).ravel() for offsets, ids in ours.groups]
    assert sorted(np.concatenate(named)) == sorted(stock)
