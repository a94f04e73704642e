"""The self-test of the mover, on a few blocks of the caches that will serve.

The blocks are filled through the layers' own views, so that what the mover believes of their
strides is tested as well, and zeroed again, as vLLM leaves them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import torch

from vllm_tagma.worker.self_test import Check, Difference, Subject

_MOST_BYTES: Final = 48 << 20
_FEWEST: Final = 6
_MOST: Final = 24


def block_moves(subject: Subject) -> None:
    """A cycle, a chain that moves up by one and single copies, in one list."""
    assert subject.mover is not None
    caches = list({(c.data_ptr(), tuple(c.shape)): c for c in subject.kv_caches}.values())
    wanted = min(max(_MOST_BYTES // subject.mover.block_bytes, _FEWEST), _MOST)
    count = min(int(wanted), subject.num_blocks - 1)
    if count < _FEWEST:
        return  # so small a pool moves nothing worth a test
    blocks = np.sort(subject.rng.choice(np.arange(1, subject.num_blocks), count, replace=False))
    third = count // 3
    cycle, chain, rest = blocks[:third], blocks[third : 2 * third], blocks[2 * third :]
    copies = [(int(cycle[i - 1]), int(block)) for i, block in enumerate(cycle)]
    copies += [(int(a), int(b)) for a, b in pairwise(chain)]
    half = len(rest) // 2
    copies += [(int(a), int(b)) for a, b in zip(rest[:half], rest[half:], strict=False)]
    source_of = {to: source for source, to in copies}

    for layer, cache in enumerate(caches):
        for block in blocks.tolist():
            part = _block(cache, block, subject.num_blocks)
            part.copy_(_content(part, seed=1 + 31 * block + 7 * layer))
    before = [_bytes(cache, blocks.tolist(), subject.num_blocks) for cache in caches]
    subject.mover.move([copies[i] for i in subject.rng.permutation(len(copies))])
    try:
        for layer, cache in enumerate(caches):
            after = _bytes(cache, blocks.tolist(), subject.num_blocks)
            for block in blocks.tolist():
                expected = before[layer][source_of.get(block, block)]
                wrong = (after[block] != expected).nonzero().flatten()
                if len(wrong):
                    raise Difference(
                        f"cache {layer} of shape {list(cache.shape)}, block {block}, byte "
                        f"{int(wrong[0])}: {int(after[block][wrong[0]])} by the mover, "
                        f"{int(expected[wrong[0]])} by the reference; {len(wrong)} of "
                        f"{len(expected)} bytes differ, copies {copies}"
                    )
    finally:
        for cache in caches:
            for block in blocks.tolist():
                _block(cache, block, subject.num_blocks).zero_()


BLOCK_MOVES: Final = Check("block moves", block_moves)


def _block(cache: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    split = cache.shape[0] // num_blocks
    return cache[block * split : (block + 1) * split]


def _content(like: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Bytes that tell blocks, layers and places within a block apart, as a tensor's elements."""
    count = like.numel() * like.element_size()
    numbers = (np.arange(1, count + 1, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(13)
    raw = torch.from_numpy((numbers * np.uint32(seed | 1) >> np.uint32(5)).astype(np.uint8))
    return raw.view(like.dtype).view(like.shape)


def _bytes(cache: torch.Tensor, blocks: list[int], num_blocks: int) -> dict[int, torch.Tensor]:
    return {
        block: _block(cache, block, num_blocks)
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
        .flatten()
        for block in blocks
    }
