"""Block copies in device memory: one launch for all layers, no temporary.

Copies of a step are meant simultaneously, and a GPU runs programs in no order. So a program copies
the same few KiB of every block of a *segment*: copies that share no block with another segment. It
waits for nobody, and what must be ordered is ordered inside it. Up to ``BATCH`` copies are read
before they are written; a cycle keeps one tile of its first block in registers.

    segments x tiles programs            tile: `size` items at address + block * stride
    segment 0: 5->7, 3->5                of one region of KV memory, keys of layer 3 say
    segment 1: 1->2, 2->1 (a cycle)

Twice the bytes of a block pass through memory. Who cuts copies into segments is not decided here:
the native planner while serving (``csrc/tagma/move_plan.hpp``), plain Python in the kernel checks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

BATCH: Final = 4
"""Copies that a program has in flight."""

TILE_BYTES: Final = 4096
"""Bytes of a block that a program copies: with ``BATCH`` of them, 128 a thread."""

_INTERPRETED_TILE_BYTES: Final = 1 << 20
"""Under the interpreter a program costs a millisecond, whatever it copies."""

FREE: Final = -2
"""Kind of a segment whose copies need no order."""

ORDERED: Final = -1
"""Kind of a segment in order of its copies. A block id instead: likewise, and the last copy takes
what that block held before."""

_MAX_PROGRAMS: Final = 2**31 - 1
_ITEMS: Final = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class MovedMemory:
    """Tiles of the regions that blocks lie in, on the device; see ``of``.

    ``tiles``: int64 [tiles, 3]: address in block 0, stride of blocks in items, items. ``align``:
    bytes that divide all of them: 16, 8, 4, 2 or 1; an item is as many, at most 8.
    """

    tiles: torch.Tensor
    align: int
    tile_items: int

    @staticmethod
    def of(regions: Sequence[tuple[int, int, int]], device: torch.device | str) -> MovedMemory:
        """The memory of ``regions``: (address, stride, bytes) of a block in each, in bytes.

        The caller vouches for it, and that no two share any. O(bytes of a block / 4 KiB). Raises
        ``ValueError`` for regions whose blocks overlap.
        """
        if not regions or any(size < 1 or stride < size for _, stride, size in regions):
            raise ValueError(f"blocks of these regions overlap or are empty: {list(regions)[:4]}")
        align = 16
        while any(number % align for region in regions for number in region):
            align //= 2
        item = min(align, 8)
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        most = _INTERPRETED_TILE_BYTES if interpreted else TILE_BYTES
        largest = max(size for _, _, size in regions)
        tile_bytes = min(most, triton.next_power_of_2(largest))
        tiles = [
            (address + at, stride // item, min(tile_bytes, size - at) // item)
            for address, stride, size in regions
            for at in range(0, size, tile_bytes)
        ]
        on_device = torch.tensor(tiles, dtype=torch.int64).to(device)
        return MovedMemory(tiles=on_device, align=align, tile_items=max(tile_bytes // item, 1))


def send(
    memory: MovedMemory, packed: npt.NDArray[np.int32], *, num_segments: int, num_copies: int
) -> None:
    """Copies blocks in stream order: one copy to the device, one launch, no synchronisation.

    ``packed``: int32 [3 * num_segments + 2 * num_copies]: (first copy, end, kind) of each segment,
    all sources, all destinations. Mutates the memory. The caller vouches for block ids, and for
    segments that share no block. Raises ``ValueError`` for another length, or for more programs
    than a launch takes.
    """
    if packed.shape != (3 * num_segments + 2 * num_copies,):
        raise ValueError(f"{packed.shape[0]} numbers for {num_segments=} and {num_copies=}")
    programs = num_segments * memory.tiles.shape[0]
    if programs > _MAX_PROGRAMS:
        raise ValueError(f"{programs} programs are more than a launch takes, {_MAX_PROGRAMS}")
    if num_segments == 0:
        return
    device = memory.tiles.device
    on_host = torch.from_numpy(packed)
    if device.type == "cuda":
        # The caching host allocator keeps a pinned buffer until the copy from it has run.
        on_host = on_host.pin_memory()
    launch(memory, on_host.to(device, non_blocking=True), num_segments, num_copies)


def launch(memory: MovedMemory, packed: torch.Tensor, num_segments: int, num_copies: int) -> None:
    """As ``send``, of numbers that are on the device."""
    _block_moves_kernel[(num_segments * memory.tiles.shape[0],)](
        packed,
        num_segments,
        num_copies,
        memory.tiles,
        memory.tiles.shape[0],
        ITEM=_TYPES[_ITEMS[memory.align]],
        ALIGN=memory.align,
        ITEMS_PER_ALIGN=max(memory.align // 8, 1),
        FREE=FREE,
        BATCH=BATCH,
        TILE=memory.tile_items,
    )


_TYPES: Final = {
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


@triton.jit(do_not_specialize=["num_segments", "num_copies"])  # type: ignore[untyped-decorator]
def _block_moves_kernel(  # type: ignore[no-untyped-def]
    packed_ptr,
    num_segments,
    num_copies,
    tiles_ptr,
    num_tiles,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    ITEMS_PER_ALIGN: tl.constexpr,
    FREE: tl.constexpr,
    BATCH: tl.constexpr,
    TILE: tl.constexpr,
):
    # Neighbouring programs copy neighbouring tiles of the same blocks.
    segment = tl.program_id(0) // num_tiles
    tile_ptr = tiles_ptr + (tl.program_id(0) % num_tiles) * 3
    begin = tl.load(tile_ptr).to(tl.pointer_type(ITEM))
    begin = tl.multiple_of(begin, ALIGN)
    stride = tl.multiple_of(tl.load(tile_ptr + 1), ITEMS_PER_ALIGN)
    # A tile ends where its region does, so its size is as aligned as everything else.
    size = tl.multiple_of(tl.load(tile_ptr + 2), ITEMS_PER_ALIGN).to(tl.int32)

    first = tl.load(packed_ptr + segment * 3)
    end = tl.load(packed_ptr + segment * 3 + 1)
    kind = tl.load(packed_ptr + segment * 3 + 2)
    sources_ptr = packed_ptr + num_segments * 3
    lane = tl.arange(0, TILE)
    inside = lane < size
    closed = kind >= 0
    saved_ptr = begin + tl.where(closed, kind, 0).to(tl.int64) * stride
    saved = tl.load(saved_ptr + lane, mask=lane < tl.where(closed, size, 0))

    for i in range(first, end, BATCH):
        copy = i + tl.arange(0, BATCH)
        live = copy < end
        source = tl.load(sources_ptr + copy, mask=live, other=0).to(tl.int64)
        to = tl.load(sources_ptr + num_copies + copy, mask=live, other=0).to(tl.int64)
        mask = live[:, None] & inside[None, :]
        items = tl.load(begin + (source * stride)[:, None] + lane[None, :], mask=mask)
        last = (copy == tl.where(closed, end - 1, -1))[:, None]
        items = tl.where(last, saved[None, :], items)
        if kind != FREE:
            # What one thread reads, another may be about to overwrite.
            tl.debug_barrier()
        tl.store(begin + (to * stride)[:, None] + lane[None, :], items, mask=mask)
        if kind != FREE:
            tl.debug_barrier()
