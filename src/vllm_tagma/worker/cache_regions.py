"""Where the blocks of a runner's KV caches lie in memory, as regions that one block id addresses.

vLLM hands a runner one tensor a layer, whose first dimension counts blocks (or the attention
kernel's smaller ones), in any order of dimensions in memory: keys and values side by side in a
block or apart, heads before tokens, all layers of a block side by side in one storage, layers that
share a tensor, MLA's latents. A mover needs none of that, only stretches:

    block b of a region = the `bytes` bytes at address + b * stride

Views are folded into as few and as long stretches as their strides allow. Like vLLM's copy, a
storage that its blocks fill exactly is moved whole, whatever lies between the layers' parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from vllm_tagma.errors import UnsupportedError

MAX_REGIONS = 65_536
"""A layout that needs more is torn into pieces of a few bytes; it is a slip, or must be refused."""


class CacheRegion(NamedTuple):
    """Block b is the ``bytes`` bytes at ``address + b * stride``; all three in bytes."""

    address: int
    stride: int
    bytes: int


def cache_regions(kv_caches: Iterable[torch.Tensor], num_blocks: int) -> list[CacheRegion]:
    """The memory of ``kv_caches``, each byte once, by address.

    ``kv_caches``: per layer, [num_blocks * k, ...] for a whole k, any strides. O(regions). Raises
    ``UnsupportedError`` for caches that blocks do not divide, or that overlap otherwise than by
    being the same.
    """
    found: set[CacheRegion] = set()
    for cache in kv_caches:
        if not isinstance(cache, torch.Tensor):
            raise _refused(f"a KV cache is a {type(cache).__name__}, not a tensor")
        found.update(_storage_or_view(cache, num_blocks))
    regions = _joined(sorted(found), num_blocks)
    if len(regions) > MAX_REGIONS:
        raise _refused(f"the KV caches are {len(regions)} stretches, more than {MAX_REGIONS}")
    return regions


def block_bytes(regions: Sequence[CacheRegion]) -> int:
    """What one block takes in all regions together."""
    return sum(region.bytes for region in regions)


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: vllm-tagma cannot move blocks there. Serve with --tagma-compaction off, or with "
        "--kv-cache-backend paged, and report this."
    )


def _storage_or_view(cache: torch.Tensor, num_blocks: int) -> list[CacheRegion]:
    split, rest = divmod(cache.shape[0], num_blocks) if cache.dim() else (0, 1)
    if rest or split == 0:
        raise _refused(f"a KV cache of shape {list(cache.shape)} is not {num_blocks} blocks")
    size = cache.element_size()
    storage = cache.untyped_storage()
    stride = cache.stride(0) * split * size
    if storage.nbytes() == num_blocks * stride:
        return [CacheRegion(storage.data_ptr(), stride, stride)]
    # Outer dimensions first; the parts of a block that the attention kernel counts are one more.
    dims = [(split, cache.stride(0)), *zip(cache.shape[1:], cache.stride()[1:], strict=True)]
    dims = sorted(((n, step * size) for n, step in dims if n > 1), key=lambda d: -d[1])
    length = size
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    if any(step < length for _, step in dims) or stride < length:
        raise _refused(f"a KV cache has shape {list(cache.shape)}, strides {list(cache.stride())}")
    offsets = [0]
    for n, step in dims:
        offsets = [offset + i * step for offset in offsets for i in range(n)]
    return [CacheRegion(cache.data_ptr() + offset, stride, length) for offset in offsets]


def _joined(regions: list[CacheRegion], num_blocks: int) -> list[CacheRegion]:
    """Regions that touch, with one stride, as one. They are sorted and distinct.

    Interleaved regions (keys and values of all layers in one storage) have one stride and lie less
    than that apart; any other overlap is refused.
    """
    out: list[CacheRegion] = []
    for region in regions:
        last = out[-1] if out else None
        if (
            last is not None
            and region.stride == last.stride
            and region.address <= last.address + last.bytes
            and region.address + region.bytes - last.address <= last.stride
        ):
            end = max(last.address + last.bytes, region.address + region.bytes)
            out[-1] = CacheRegion(last.address, last.stride, end - last.address)
        else:
            out.append(region)
    open_regions: list[CacheRegion] = []  # that reach beyond the region looked at
    for region in out:
        open_regions = [
            r
            for r in open_regions
            if r.address + (num_blocks - 1) * r.stride + r.bytes > region.address
        ]
        for other in open_regions:
            apart = (region.address - other.address) % other.stride
            fits = other.bytes <= apart and apart + region.bytes <= other.stride
            if region.stride != other.stride or not fits:
                raise _refused(f"KV caches overlap: {other} and {region}")
        open_regions.append(region)
    return out
