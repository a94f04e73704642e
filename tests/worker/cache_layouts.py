"""KV caches in every arrangement that vLLM's runners hand to a mover, filled with random bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCKS = 24
Caches = list[torch.Tensor]


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    width = shape[-1] * size
    generator = torch.Generator().manual_seed(shape[0] + width)
    raw = torch.randint(0, 256, (*shape[:-1], width), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def _padded() -> Caches:
    """Two layers side by side in each block, and some padding that belongs to no layer."""
    whole = _random((BLOCKS, 3 * 128 + 16), torch.bfloat16)
    return [whole[:, at : at + 128].unflatten(1, (2, 8, 8)) for at in (0, 192)]


def _shared_by_groups() -> Caches:
    """Two groups of layers over one tensor: attention blocks of another size, the same bytes."""
    tensor = _random((BLOCKS, 2, 8, 4))
    return [tensor, tensor.view(2 * BLOCKS, 2, 4, 4), _random((BLOCKS, 2, 8, 4))]


LAYOUTS: dict[str, Callable[[], Caches]] = {
    "a storage per layer": lambda: [_random((BLOCKS, 2, 8, 4 + i)) for i in range(3)],
    "layers in one storage": lambda: list(_random((3, BLOCKS, 2, 8, 4)).unbind(0)),
    "blocks of all layers side by side": lambda: list(_random((BLOCKS, 3, 2, 8, 4)).unbind(1)),
    "the same, padded": _padded,
    "smaller attention blocks": lambda: [_random((4 * BLOCKS, 2, 2, 4)) for _ in range(2)],
    "keys and values apart": lambda: [_random((2, BLOCKS, 8, 4)).transpose(0, 1)],
    "keys and values apart, smaller attention blocks": lambda: [
        _random((2, 2 * BLOCKS, 4, 4)).transpose(0, 1)
    ],
    "heads before tokens": lambda: [
        _random((BLOCKS, 2, 4, 8, 4), torch.float16).permute(0, 1, 3, 2, 4)
    ],
    "heads outermost": lambda: [_random((4, BLOCKS, 8, 4)).permute(1, 2, 0, 3)],
    "latents": lambda: [_random((BLOCKS, 16, 36), torch.bfloat16) for _ in range(2)],
    "dtypes and sizes of their own": lambda: [
        _random((BLOCKS, 2, 8, 4), torch.bfloat16),
        _random((BLOCKS, 2, 8, 3), torch.uint8),
        _random((BLOCKS, 5), torch.float32),
    ],
    "a layer that shares another's cache": lambda: [_random((BLOCKS, 2, 8, 4))] * 2,
    "groups over one tensor": _shared_by_groups,
    "blocks larger than the scratch": lambda: [_random((BLOCKS, 2, 70, 100), torch.bfloat16)],
}


def copied(cache: torch.Tensor, copies: list[tuple[int, int]]) -> torch.Tensor:
    """What ``cache`` must hold afterwards: each block from an untouched original."""
    split = cache.shape[0] // BLOCKS
    original, result = cache.clone(), cache.clone()
    for source, destination in copies:
        for part in range(split):
            result[destination * split + part] = original[source * split + part]
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, so that a NaN equals itself."""
    a, b = a.contiguous(), b.contiguous()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def storage(cache: torch.Tensor) -> torch.Tensor:
    """All bytes that ``cache`` is a view of, what lies between its own included."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
