"""A prepared descriptor list in closed form: where descriptor ``i`` lies, without keeping the list.

vLLM's NIXL connectors prepare one descriptor (address, bytes, device) for each block and region,
once, and name them by index afterwards. Where blocks lie back to back the list is arithmetic,
``address + i * bytes`` over a *stretch*. A list of regions of blocks has one stretch a region, or
fewer where regions touch. Blocks with gaps between them (one layer's share of a block that several
layers are packed into, one rank's heads of it) cannot be merged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tagma._native import RegionMap
from vllm_tagma.transfer.joint_runs import Ids

Descriptors = npt.NDArray[np.uint64]
"""(N, 3): address, bytes, device, as NIXL takes them."""


class DescriptorSpace:
    """The stretches of a prepared list.

    From descriptors (N, 3), or from the form that vLLM 0.33 prepares, (N, 5): address, bytes,
    device, bytes from a block to the next, blocks.
    """

    def __init__(self, table: npt.NDArray[Any]) -> None:
        """``table`` is not kept. O(N). Raises ``ValueError`` unless it has one of the two forms."""
        if table.ndim != 2 or table.shape[1] not in (3, 5) or not len(table):
            raise ValueError(f"a table of shape {table.shape}, expected (N, 3) or (N, 5), N > 0")
        rows = table.astype(np.int64)
        address, size, device = rows[:, :3].T
        if table.shape[1] == 5:
            stride, counts = rows[:, 3:].T
            starts = np.cumsum(counts) - counts
            self._dense = (stride == size) | (counts == 1)
            self.num_descriptors = int(counts.sum())
        else:
            breaks = (
                (address[1:] != address[:-1] + size[:-1])
                | (size[1:] != size[:-1])
                | (device[1:] != device[:-1])
            )
            starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
            address, size, device = address[starts], size[starts], device[starts]
            self._dense = np.ones(len(starts), dtype=bool)
            self.num_descriptors = len(rows)
        self._first = starts
        self._address, self._size, self._device = address, size, device
        self._maps: dict[tuple[bytes, bytes], tuple[RegionMap, int] | None] = {}

    def regions(self, offsets: Ids, boundaries: Ids) -> tuple[RegionMap, int] | None:
        """Regions of which block 0 is descriptor ``offsets[k]``, and the device that they lie on.

        ``boundaries``: where any region of the list begins, ascending; a region ends there. It is
        ``None`` if these are no regions of blocks back to back on one device that do not overlap.
        Kept for the next transfer, which has the same offsets: O(regions) then, else O(regions log
        regions).
        """
        key = (offsets.tobytes(), boundaries.tobytes())
        if key not in self._maps:
            self._maps[key] = self._make_regions(offsets, boundaries)
        return self._maps[key]

    def _make_regions(self, offsets: Ids, boundaries: Ids) -> tuple[RegionMap, int] | None:
        if not len(offsets) or offsets.min() < 0 or offsets.max() >= self.num_descriptors:
            return None
        following = np.append(boundaries, self.num_descriptors)
        end = following[np.searchsorted(boundaries, offsets, side="right")]
        stretch = np.searchsorted(self._first, offsets, side="right") - 1
        stretch_end = np.append(self._first, self.num_descriptors)[stretch + 1]
        devices = np.unique(self._device[stretch])
        if np.any(stretch_end < end) or not self._dense[stretch].all() or len(devices) != 1:
            return None
        size = self._size[stretch]
        address = self._address[stretch] + (offsets - self._first[stretch]) * size
        blocks = end - offsets
        try:
            regions = RegionMap(zip(address.tolist(), blocks.tolist(), size.tolist(), strict=True))
        except ValueError:
            return None  # memory that overlaps
        return regions, int(devices[0])


def write_runs(regions: RegionMap, device: int, starts: Ids, counts: Ids) -> Descriptors:
    """The descriptors of runs of blocks, region by region. O(regions * runs).

    Raises:
        ValueError: a run leaves a region.
    """
    out = np.empty((len(regions) * len(starts), 3), dtype=np.uint64)
    regions.write_descriptors(starts, counts, device, out.view(np.int64).reshape(-1))
    return out
