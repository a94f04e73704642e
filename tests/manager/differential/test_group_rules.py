"""The rules for several groups and for windows against vLLM's own coordinator and managers.

Both caches are given the same blocks, with the same ones missing; every look-up must end at the
same length, with null blocks at the same places, and with the same shared-prefix boundary. Block
ids differ: only whether a place is null is compared, and that every other block is cached under the
right hash (``Pool.lookup`` would not find it otherwise).
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from vllm_tagma._native import BlockRanges, Pool
from vllm_tagma.group_hits import LookupGroup, common_hit
from vllm_tagma.group_needs import ChunkNeeds, HeadNeeds, WindowNeeds
from vllm_tagma.group_spec import GroupSpec

BLOCK_SIZE = 4
LONGEST = 40
FULL = None
LAYOUTS: dict[str, list[int | None]] = {  # windows in tokens; below 0: chunks
    "window": [9],
    "full+window": [FULL, 9],
    "window+full": [14, FULL],
    "full+2 alike": [FULL, 9, 9],
    "2 alike+full": [9, 9, FULL],
    "full+2 others": [FULL, 6, 17],
    "2 full+window": [FULL, FULL, 9],
    "2 windows": [5, 11],
    "2 alike": [7, 7],
    "chunk": [-12],
    "full+chunk": [FULL, -12],
    "full+chunk+window": [FULL, -8, 11],
    "full+2 chunks": [-8, -20, FULL],
}


def spec_of(window: int | None) -> Any:
    common: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": torch.float32,
    }
    if window is None:
        return FullAttentionSpec(**common)
    if window < 0:
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=-window)
    return SlidingWindowSpec(**common, sliding_window=window)


def needs_of(window: int, in_flight: int = 64, longest: int = 1 << 20) -> HeadNeeds:
    if window < 0:
        return ChunkNeeds(BLOCK_SIZE, -window, in_flight, longest)
    return WindowNeeds(BLOCK_SIZE, window, in_flight, longest)


class Caches:
    """A pool and vLLM's coordinator with the same content."""

    def __init__(self, windows: list[int | None]) -> None:
        self.windows = windows
        num_blocks = 4 * LONGEST * len(windows) + 1
        self.pool = Pool(
            num_blocks,
            groups=[GroupSpec() if w is None else needs_of(w).pool_group for w in windows],
        )
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{g}"], spec_of(w)) for g, w in enumerate(windows)
            ],
        )
        self.stock = get_kv_cache_coordinator(
            config,
            max_model_len=1 << 20,
            max_in_flight_tokens=64,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        alike: dict[int | None, list[int]] = {}
        for group, window in enumerate(windows):
            alike.setdefault(window, []).append(group)
        self.order = sorted(
            (LookupGroup(tuple(groups), w is None) for w, groups in alike.items()),
            key=lambda group: not group.nested,
        )

    def store(self, keys: list[bytes], missing: list[set[int]]) -> None:
        """Caches all blocks of a prompt in each group but the ``missing`` ones."""
        needs: list[Any] = []
        for _ in self.windows:
            needs += (BlockRanges(), len(keys), 0, len(keys), len(keys), 0, len(keys), keys)
        self.pool.begin_step()
        admitted = self.pool.admit(0, 0, *needs)
        assert admitted is not None
        row, added = admitted
        self.pool.end_scheduling()
        self.pool.free(row)
        for group, (blocks, without) in enumerate(zip(added, missing, strict=True)):
            ids = blocks.ids()
            self.pool.evict([ids[i] for i in without])
            for i, key in enumerate(keys):
                if i not in without:
                    (block,) = self.stock.block_pool.get_new_blocks(1)
                    self.stock.block_pool._insert_block_hash(
                        make_block_hash_with_group_id(key, group), block, num_tokens=None
                    )

    def compare(self, keys: list[bytes], max_blocks: int) -> tuple[int, int]:
        max_blocks = min(max_blocks, len(keys))
        stock, tokens, uncached = self.stock.find_longest_cache_hit(keys, max_blocks * BLOCK_SIZE)
        ours = common_hit(self.pool, self.order, keys, max_blocks)
        assert ours.num_blocks * BLOCK_SIZE == tokens
        assert (ours.longest_blocks - ours.num_blocks) * BLOCK_SIZE == uncached
        for blocks, hit in zip(stock, ours.blocks, strict=True):
            assert [block.is_null for block in blocks] == [b == 0 for b in hit.ids()]
        return ours.num_blocks, ours.longest_blocks


def any_missing(rng: random.Random, length: int, rate: float) -> set[int]:
    """Single blocks, and sometimes a head or a tail: what skipping and eviction leave."""
    missing = {i for i in range(length) if rng.random() < rate}
    if rng.random() < 0.3:
        missing |= set(range(rng.randint(0, length)))
    if rng.random() < 0.3:
        missing |= set(range(rng.randint(0, length), length))
    return missing


def run_seed(layout: str, seed: int) -> tuple[int, int]:
    rng = random.Random(f"{layout}/{seed}")
    caches = Caches(LAYOUTS[layout])
    prompts: list[list[bytes]] = []
    for _ in range(rng.randint(1, 3)):
        start = rng.choice(prompts)[: rng.randint(0, LONGEST)] if prompts else []
        tail = rng.randint(1, LONGEST) - len(start)
        prompts.append(start + [rng.randbytes(32) for _ in range(max(tail, 1))])
        rate = rng.choice([0.0, 0.02, 0.1, 0.3])
        caches.store(
            prompts[-1], [any_missing(rng, len(prompts[-1]), rate) for _ in caches.windows]
        )
    hits = lagging = 0
    for keys in prompts:
        for max_blocks in {0, len(keys) - 1, len(keys), rng.randint(0, len(keys))}:
            hit, longest = caches.compare(keys, max_blocks)
            hits += hit > 0
            lagging += longest > hit
    caches.pool.check_invariants()
    return hits, lagging


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_common_hit_is_vllms(layout: str) -> None:
    hits = lagging = 0
    for seed in range(200):
        found, longer = run_seed(layout, seed)
        hits += found
        lagging += longer
    assert hits > 200, "look-ups that find nothing show nothing"
    assert (lagging > 50) == (len(set(LAYOUTS[layout])) > 1)


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9, 17, 64, -4, -8, -20])
def test_skipped_blocks_and_the_gate_are_vllms(window: int) -> None:
    caches = Caches([window])
    (manager,) = caches.stock.single_type_managers
    needs = needs_of(window)
    for tokens in range(300):
        skipped = needs.skipped_blocks(tokens)
        assert skipped == manager.get_num_skipped_tokens(tokens) // BLOCK_SIZE
        at = needs.next_skip(skipped)
        assert needs.skipped_blocks(at) > skipped == needs.skipped_blocks(at - 1)
        assert window < 0 or needs.skipped_blocks(at) == skipped + 1
    for in_flight, longest in [(1, 1000), (64, 1000), (1000, 100), (16, 16)]:
        expected = spec_of(window).max_admission_blocks_per_request(in_flight, longest)
        assert needs_of(window, in_flight, longest).gate_blocks == expected


@pytest.mark.parametrize("retention", [None, 0, 1, 2, 3, 7])
def test_cached_spans_are_vllms_mask(retention: int | None) -> None:
    """The interval in blocks. Boundaries stand where prompts end, on and off a block's edge."""
    rng = random.Random(f"retention {retention}")
    interval = None if retention is None else retention * BLOCK_SIZE
    partial = 0
    for _ in range(2_000):
        window = rng.randint(2, 40)
        first = rng.randint(0, 30)
        last = first + rng.randint(0, 30)
        boundaries = [rng.randint(0, 70 * BLOCK_SIZE) for _ in range(rng.randint(0, 3))]
        mask = SlidingWindowManager.reachable_block_mask(
            start_block=first,
            end_block=last,
            alignment_tokens=BLOCK_SIZE,
            kv_cache_spec=spec_of(window),
            use_eagle=False,
            retention_interval=interval,
            reachable_boundaries=boundaries,
        )
        wanted = [True] * (last - first) if mask is None else mask
        spans = needs_of(window).cached_spans(first, last, boundaries, interval)
        covered = [i for start, end in spans for i in range(start, end)]
        assert covered == [first + i for i, kept in enumerate(wanted) if kept]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)), spans
        partial += 0 < len(covered) < last - first
    assert (partial > 100) == (retention not in (None, 1))
