"""Prepared lists in closed form: a run covers the bytes of the descriptors that it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tagma._native import RegionMap
from vllm_tagma.transfer.descriptor_space import DescriptorSpace, write_runs


def dense(regions, device=0):
    """Descriptors of (address, blocks, bytes) regions, as vLLM 0.32 lists them."""
    rows = [
        (address + block * size, size, device)
        for address, blocks, size in regions
        for block in range(blocks)
    ]
    return np.array(rows, dtype=np.uint64)


def strided(regions, device=0):
    """The same as vLLM 0.33 lists them."""
    rows = [(address, size, device, size, blocks) for address, blocks, size in regions]
    return np.array(rows, dtype=np.uint64)


def offsets_of(regions):
    counts = [blocks for _, blocks, _ in regions]
    return np.cumsum([0, *counts[:-1]]).astype(np.int64)


def bytes_of(table):
    return [(int(a) + i, int(d)) for a, size, d in table for i in range(int(size))]


@st.composite
def memories(draw):
    """Regions in any order of addresses, some touching."""
    regions, at = [], draw(st.integers(0, 50))
    for _ in range(draw(st.integers(1, 5))):
        blocks, size = draw(st.integers(1, 12)), draw(st.integers(1, 5))
        regions.append((at, blocks, size))
        at += blocks * size + draw(st.sampled_from([0, 0, 7]))
    return draw(st.permutations(regions))


@given(memories(), st.sampled_from([dense, strided]), st.data())
def test_runs_cover_what_their_descriptors_cover(regions, form, data):
    device = data.draw(st.integers(0, 3))
    space = DescriptorSpace(form(regions, device))
    offsets = offsets_of(regions)
    found = space.regions(offsets, offsets)
    assert found is not None
    region_map, found_device = found
    assert (len(region_map), found_device) == (len(regions), device)
    smallest = min(blocks for _, blocks, _ in regions)
    start = data.draw(st.integers(0, smallest - 1))
    count = data.draw(st.integers(1, smallest - start))
    runs = write_runs(region_map, device, np.array([start]), np.array([count]))
    table = dense(regions, device)
    chosen = [table[offset + block] for offset in offsets for block in range(start, start + count)]
    assert bytes_of(runs) == bytes_of(chosen)
    assert space.regions(offsets, offsets) is found, "kept for the next transfer"


def test_a_region_ends_where_the_next_begins():
    regions = [(0, 10, 4), (40, 10, 4)]  # they touch, so the list is one stretch
    space = DescriptorSpace(dense(regions))
    offsets = np.array([0, 10])
    region_map, _ = space.regions(offsets, offsets)
    with pytest.raises(ValueError, match="run of 2 blocks from 9 is outside"):
        write_runs(region_map, 0, np.array([9]), np.array([2]))
    second, _ = space.regions(np.array([10]), offsets)  # one group's regions among all
    assert len(second) == 1
    assert second.address(0, 0) == 40


@pytest.mark.parametrize(
    ("table", "offsets"),
    [
        (np.array([(i * 12, 8, 0) for i in range(10)]), [0]),
        (np.array([(0, 8, 0, 12, 10)]), [0]),
        (np.concatenate([dense([(0, 5, 8)], device=0), dense([(100, 5, 8)], device=1)]), [0, 5]),
        (np.concatenate([dense([(0, 5, 8)]), dense([(8, 5, 8)])]), [0, 5]),
    ],
    ids=["gaps", "strided-gaps", "devices", "overlap"],
)
def test_what_is_no_region_of_blocks_cannot_be_merged(table, offsets):
    assert DescriptorSpace(table).regions(np.array(offsets), np.array(offsets)) is None


def test_offsets_outside_the_list():
    space = DescriptorSpace(dense([(0, 5, 8)]))
    for offsets in (np.array([], dtype=np.int64), np.array([5]), np.array([-1])):
        assert space.regions(offsets, offsets) is None


@pytest.mark.parametrize("shape", [(0, 3), (3, 2), (6,)])
def test_tables_of_another_form(shape):
    with pytest.raises(ValueError, match="expected"):
        DescriptorSpace(np.zeros(shape, dtype=np.uint64))


def test_descriptors_are_written_region_by_region():
    regions = RegionMap([(1_000, 50, 8), (0, 60, 4)])
    runs = write_runs(regions, 5, np.array([7, 20, 8]), np.array([1, 3, 2]))
    assert runs.tolist() == [
        *([1056, 8, 5], [1160, 24, 5], [1064, 16, 5]),
        *([28, 4, 5], [80, 12, 5], [32, 8, 5]),
    ]
