"""vLLM's block copies as moves rely on them: all sources are read before anything is written.

A copy list may hold A->B and C->A, swaps and cycles; destinations are distinct. If vLLM ever copied
one block after the other, moved KV would be overwritten before it is read. That 0.33 has the same
function is for ``tests/plugin/test_step_order.py``.
"""

from __future__ import annotations

import random

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

BLOCKS = 24
Copies = list[tuple[int, int]]

LISTS: dict[str, Copies] = {
    "one": [(3, 7)],
    "chain": [(3, 7), (9, 3), (2, 9)],
    "chain, other order": [(2, 9), (9, 3), (3, 7)],
    "swap": [(4, 5), (5, 4)],
    "cycle": [(1, 2), (2, 3), (3, 4), (4, 1)],
    "one source twice": [(6, 7), (6, 8)],
    "overlapping runs down": [(i, i - 2) for i in range(5, 20)],
    "overlapping runs up": [(i, i + 3) for i in range(2, 20)],
    "every block": [(i, (i * 7 + 3) % BLOCKS) for i in range(BLOCKS)],
}


def _layers(layout: str) -> list[torch.Tensor]:
    """Caches of three layers, filled with numbers that no two elements share."""
    generator = torch.Generator().manual_seed(5)
    shape = (BLOCKS, 2, 8, 4)
    if layout == "a storage per layer":
        return [torch.randn(shape, generator=generator) for _ in range(3)]
    if layout == "layers in one storage":  # as the CPU runners allocate them
        whole = torch.randn((3, *shape), generator=generator)
        return list(whole.unbind(0))
    if layout == "blocks of all layers side by side":
        whole = torch.randn((BLOCKS, 3, *shape[1:]), generator=generator)
        return list(whole.unbind(1))
    if layout == "smaller attention blocks":  # kernel_block_size is a quarter of block_size
        return [torch.randn((4 * BLOCKS, 2, 2, 4), generator=generator) for _ in range(3)]
    if layout == "keys and values apart":  # the block is not the outermost dimension in memory
        return [torch.randn((2, BLOCKS, 8, 4), generator=generator).transpose(0, 1)]
    assert layout == "a layer that shares another's cache"
    first, second = (torch.randn(shape, generator=generator) for _ in range(2))
    return [first, second, first]


LAYOUTS = [
    "a storage per layer",
    "layers in one storage",
    "blocks of all layers side by side",
    "smaller attention blocks",
    "keys and values apart",
    "a layer that shares another's cache",
]


def _expected(cache: torch.Tensor, copies: Copies) -> torch.Tensor:
    """One block after the other, each from an untouched original."""
    split = cache.shape[0] // BLOCKS
    original, result = cache.clone(), cache.clone()
    for source, destination in copies:
        for part in range(split):
            result[destination * split + part] = original[source * split + part]
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LISTS)
def test_all_sources_are_read_before_any_destination_is_written(name: str, layout: str) -> None:
    caches, copies = _layers(layout), LISTS[name]
    expected = [_expected(cache, copies) for cache in caches]
    copy_kv_cache_blocks_inplace(caches, BLOCKS, copies)  # plain tuples will do
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


def test_random_permutations_of_tuples_and_of_vllms_own_pairs() -> None:
    rng = random.Random(3)
    for layout in LAYOUTS:
        caches = _layers(layout)
        for _ in range(6):
            sources = rng.sample(range(BLOCKS), rng.randint(2, BLOCKS))
            pairs = list(zip(sources, rng.sample(sources, len(sources)), strict=True))
            expected = [_expected(cache, pairs) for cache in caches]
            copy_kv_cache_blocks_inplace(caches, BLOCKS, [KVCacheBlockCopy(*p) for p in pairs])
            assert all(torch.equal(c, e) for c, e in zip(caches, expected, strict=True))


def test_a_copy_after_a_copy_would_be_noticed() -> None:
    """The same function, made to copy one pair at a time: the comparison above is not idle."""
    caches, copies = _layers("a storage per layer"), LISTS["swap"]
    expected = _expected(caches[0], copies)
    for pair in copies:
        copy_kv_cache_blocks_inplace(caches, BLOCKS, [pair])
    assert not torch.equal(caches[0], expected)
