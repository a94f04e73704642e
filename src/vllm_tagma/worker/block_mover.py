"""Who copies a step's moved blocks: threads on a CPU, one Triton launch on a device.

Both take (source, destination) pairs with distinct destinations, as if all sources were read before
anything is written. Neither needs a temporary that grows with the copies: the CPU's has
``SCRATCH_BYTES`` a thread, the GPU's none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np
import torch

from vllm_tagma._native import MOVER_SCRATCH, BlockMover, MovePlanner
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.worker.cache_regions import CacheRegion, block_bytes, cache_regions

SCRATCH_BYTES: Final = MOVER_SCRATCH
"""Of each thread, on its stack."""

Copies = Sequence[tuple[int, int]]


class Mover(Protocol):
    """Copies blocks of one set of KV caches."""

    block_bytes: int
    """Of one block, over all layers."""

    def move(self, copies: Copies) -> None:
        """Copies blocks in place, in stream order. Raises ``ValueError``, having changed nothing,
        for ids outside the pool and for a destination that is named twice."""


class HostMover:
    """Host memory, on torch's number of threads; returns when all is copied."""

    def __init__(self, regions: Sequence[CacheRegion], num_blocks: int) -> None:
        self._native = BlockMover(num_blocks, regions)
        self.block_bytes = block_bytes(regions)

    def move(self, copies: Copies) -> None:
        self._native.move(copies, torch.get_num_threads())


class DeviceMover:
    """Device memory, by the Triton kernel, on the current stream; or by its interpreter."""

    def __init__(
        self, regions: Sequence[CacheRegion], num_blocks: int, device: torch.device
    ) -> None:
        # Triton may be absent where no device is.
        from vllm_tagma.kernels import block_moves

        self._kernels = block_moves
        self._planner = MovePlanner(num_blocks)
        self._memory = block_moves.MovedMemory.of(regions, device)
        self.block_bytes = block_bytes(regions)

    def move(self, copies: Copies) -> None:
        num_segments, num_copies, packed = self._planner.segments(copies, self._kernels.BATCH)
        self._kernels.send(
            self._memory,
            np.frombuffer(bytearray(packed), dtype=np.int32),
            num_segments=num_segments,
            num_copies=num_copies,
        )


def mover_of(
    kv_caches: Iterable[torch.Tensor], num_blocks: int, *, interpreted: bool = False
) -> Mover:
    """The mover for these caches; on a CPU the kernel only if ``interpreted``.

    Raises ``UnsupportedError`` for memory that cannot be moved (``cache_regions.py``).
    """
    caches = list(kv_caches)
    regions = cache_regions(caches, num_blocks)
    devices = {cache.device for cache in caches}
    if len(devices) != 1:
        raise UnsupportedError(
            f"the KV caches are on {len(devices)} devices; vllm-tagma moves blocks on one. Serve "
            "with --kv-cache-backend paged."
        )
    device = devices.pop()
    if device.type == "cpu" and not interpreted:
        return HostMover(regions, num_blocks)
    return DeviceMover(regions, num_blocks, device)
