"""The Triton mover against a naive copy, over cache layouts and lists of copies, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cache_layouts import BLOCKS, LAYOUTS, copied, same_bits

from vllm_tagma.kernels import block_moves
from vllm_tagma.lab.kernel_check.move_reference import copy_one_by_one, segments_of
from vllm_tagma.worker.block_mover import DeviceMover
from vllm_tagma.worker.cache_regions import cache_regions

Copies = list[tuple[int, int]]

LISTS: dict[str, Copies] = {
    "one": [(3, 7)],
    "chain": [(3, 7), (9, 3), (2, 9)],
    "swap": [(4, 5), (5, 4)],
    "a cycle longer than a batch": [(i, (i + 1) % 9) for i in range(9)],
    "cycle with a branch": [(1, 2), (2, 3), (3, 1), (3, 9), (9, 10), (1, 11)],
    "one source many times": [(6, i) for i in range(7, 20)],
    "overlapping runs down": [(i, i - 2) for i in range(5, 20)],
    "overlapping runs up": [(i, i + 3) for i in range(2, 20)],
    "every block": [(i, (i * 7 + 3) % BLOCKS) for i in range(BLOCKS)],
    "none, and one onto itself": [(8, 8)],
}


def _on(device: str, caches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same layout on a device: views of one storage stay views of one storage."""
    moved: dict[int, torch.Tensor] = {}
    out = []
    for cache in caches:
        storage = cache.untyped_storage()
        if storage.data_ptr() not in moved:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            moved[storage.data_ptr()] = whole.to(device)
        typed = moved[storage.data_ptr()].view(cache.dtype)
        out.append(typed.as_strided(cache.shape, cache.stride(), cache.storage_offset()))
    return out


def _check(device: str, layout: str, copies: Copies) -> None:
    caches = _on(device, LAYOUTS[layout]())
    wanted = [copied(cache.cpu(), copies) for cache in caches]
    mover = DeviceMover(cache_regions(caches, BLOCKS), BLOCKS, caches[0].device)
    mover.move(copies)
    for cache, expected in zip(caches, wanted, strict=True):
        assert same_bits(cache.cpu(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def check_every_layout(device: str, layout: str) -> None:
    for name in ("every block", "cycle with a branch"):
        _check(device, layout, LISTS[name])


@pytest.mark.parametrize("name", LISTS)
def check_every_list(device: str, name: str) -> None:
    _check(device, "keys and values apart", LISTS[name])


def check_random_copies(device: str) -> None:
    rng = random.Random(5)
    for _ in range(25):
        to = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
        sources = rng.choices(range(BLOCKS), k=len(to)) if rng.random() < 0.5 else to[::-1]
        _check(device, "dtypes and sizes of their own", list(zip(sources, to, strict=True)))


def check_tiles_of_a_block(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several tiles, the last one short, with every alignment."""
    monkeypatch.setattr(block_moves, "TILE_BYTES", 64)
    monkeypatch.setattr(block_moves, "_INTERPRETED_TILE_BYTES", 64)
    for width, align in ((200, 8), (208, 16), (100, 4), (90, 2), (75, 1)):
        cache = torch.randint(0, 256, (BLOCKS, width), dtype=torch.uint8).to(device)
        memory = block_moves.MovedMemory.of([(cache.data_ptr(), width, width)], device)
        assert (memory.align, memory.tiles.shape[0]) == (align, -(-width // 64))
        wanted = copy_one_by_one(cache, LISTS["every block"])
        segments, copies, packed = segments_of(LISTS["every block"], block_moves.BATCH)
        block_moves.send(memory, packed, num_segments=segments, num_copies=copies)
        assert torch.equal(cache, wanted), width


def check_segments_in_plain_python_do_as_the_planners(device: str) -> None:
    rng = random.Random(9)
    cache = torch.randint(0, 99, (BLOCKS, 16), dtype=torch.int32).to(device)
    memory = block_moves.MovedMemory.of([(cache.data_ptr(), 64, 64)], device)
    lists = list(LISTS.values())
    for _ in range(20):
        to = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
        lists.append(list(zip(rng.choices(range(BLOCKS), k=len(to)), to, strict=True)))
    for listed in lists:
        wanted = copy_one_by_one(cache, listed)
        segments, copies, packed = segments_of(listed, block_moves.BATCH)
        block_moves.send(memory, packed, num_segments=segments, num_copies=copies)
        assert torch.equal(cache, wanted), listed


def check_arguments_that_do_not_fit_are_refused(device: str) -> None:
    cache = torch.zeros((BLOCKS, 16), dtype=torch.uint8, device=device)
    memory = block_moves.MovedMemory.of([(cache.data_ptr(), 16, 16)], device)
    with pytest.raises(ValueError, match="4 numbers for num_segments=1 and num_copies=1"):
        block_moves.send(memory, np.zeros(4, dtype=np.int32), num_segments=1, num_copies=1)
    with pytest.raises(ValueError, match="overlap or are empty"):
        block_moves.MovedMemory.of([(cache.data_ptr(), 8, 16)], device)
    with pytest.raises(ValueError, match="overlap or are empty"):
        block_moves.MovedMemory.of([], device)
