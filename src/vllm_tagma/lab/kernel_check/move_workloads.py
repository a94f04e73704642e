"""Block copies for the GPU check: our one launch against a gather and a scatter for each layer.

Both copy the same blocks of the same caches. What a step's copies cost on the way to the device, a
list of a few KiB, is in neither.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from vllm_tagma.kernels import block_moves
from vllm_tagma.lab.kernel_check.kernel_workload import Workload
from vllm_tagma.lab.kernel_check.move_reference import (
    Copies,
    copy_one_by_one,
    gather_and_scatter,
    segments_of,
)

LAYERS: Final = 8
BLOCK_SHAPE: Final = (2, 16, 8, 128)
"""64 KiB of a layer: 16 tokens, 8 KV heads, 16 bits."""

CALLS_PER_SAMPLE: Final = 2
"""Such a call takes milliseconds."""

_CHECKED: Final[tuple[Copies, ...]] = (
    [(3, 7)],
    [(3, 7), (9, 3), (2, 9)],
    [(4, 5), (5, 4)],
    [(i, (i + 1) % 9) for i in range(9)],
    [(1, 2), (2, 3), (3, 1), (3, 9), (9, 10), (1, 11)],
    [(6, i) for i in range(7, 20)],
    [(i, i - 2) for i in range(5, 24)],
    [(i, i + 3) for i in range(2, 20)],
    [(i, (i * 7 + 3) % 24) for i in range(24)],
)
_WIDTHS: Final = (65536, 4096, 5000, 4098, 777)
"""Bytes of a block, so that every alignment and a short last tile occur."""


def memory_of(caches: Sequence[torch.Tensor]) -> block_moves.MovedMemory:
    """The mover's view of contiguous caches, [blocks, ...]."""
    regions = []
    for cache in caches:
        stride = cache.stride(0) * cache.element_size()
        regions.append((cache.data_ptr(), stride, stride))
    return block_moves.MovedMemory.of(regions, caches[0].device)


def check_moves(*, device: str) -> None:
    """Chains, cycles, overlaps and permutations. Raises ``AssertionError`` where a byte differs."""
    rng = random.Random(1)
    for width in _WIDTHS:
        for copies in (*_CHECKED, [(i, j) for j, i in enumerate(rng.sample(range(24), 24))]):
            caches = [
                torch.randint(0, 256, (24, width), dtype=torch.uint8, device=device)
                for _ in range(2)
            ]
            wanted = [copy_one_by_one(cache, copies) for cache in caches]
            segments, count, packed = segments_of(copies, block_moves.BATCH)
            block_moves.send(memory_of(caches), packed, num_segments=segments, num_copies=count)
            for layer, (cache, expected) in enumerate(zip(caches, wanted, strict=True)):
                wrong = (cache != expected).any(dim=1).nonzero().flatten().tolist()
                assert not wrong, f"{width} bytes, copies {copies}: layer {layer}, blocks {wrong}"


def move_workloads(
    device: str, counts: Sequence[int] = (512, 4096), shape: tuple[int, ...] = BLOCK_SHAPE
) -> Iterator[Workload]:
    """Scattered blocks, and runs that move up by half their length."""
    blocks = 2 * max(counts)
    caches = [
        torch.zeros((blocks, *shape), dtype=torch.bfloat16, device=device) for _ in range(LAYERS)
    ]
    memory = memory_of(caches)
    for count in counts:
        ids = random.Random(count).sample(range(blocks), 2 * count)
        runs = [(i, i + count // 8) for i in range(count)]
        scattered = list(zip(ids[:count], ids[count:], strict=True))
        for name, copies in (("scattered", scattered), ("shifted", runs)):
            yield _moves_of(f"moves, {count} blocks, {name}", caches, memory, copies)


def _moves_of(
    name: str,
    caches: Sequence[torch.Tensor],
    memory: block_moves.MovedMemory,
    copies: Copies,
) -> Workload:
    device = caches[0].device
    sources, destinations = torch.tensor(copies, dtype=torch.int64, device=device).unbind(1)
    segments, count, packed = segments_of(copies, block_moves.BATCH)
    on_device = torch.from_numpy(packed).to(device)

    def gathered() -> torch.Tensor:
        gather_and_scatter(caches, sources, destinations)
        return caches[0]

    def moved() -> torch.Tensor:
        block_moves.launch(memory, on_device, segments, count)
        return caches[0]

    return Workload(name, gathered, moved, CALLS_PER_SAMPLE)
