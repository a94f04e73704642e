"""The native value types: ``BlockRanges`` and ``CoordMap``."""

from __future__ import annotations

import pytest

from vllm_tagma._native import BlockRanges, CoordMap, RegionMap

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# --- BlockRanges ------------------------------------------------------------------------------


def test_block_ranges_merge_what_is_adjacent() -> None:
    ranges = BlockRanges([(4, 2), (6, 1), (2, 2), (9, 1)])
    assert ranges.ranges() == [(4, 3), (2, 2), (9, 1)]
    assert ranges.ids() == [4, 5, 6, 2, 3, 9]
    assert len(ranges) == 6
    assert ranges.num_ranges == 3
    assert repr(ranges) == "BlockRanges([(4, 3), (2, 2), (9, 1)])"


def test_block_ranges_give_a_fresh_list_on_every_call() -> None:
    ranges = BlockRanges([(4, 2)])
    ids = ranges.ids()
    ids.append(99)  # as vLLM's worker does with the lists it receives
    ranges.ranges().clear()
    assert ranges.ids() == [4, 5]
    assert ranges.ranges() == [(4, 2)]
    empty = BlockRanges()
    empty.ids().append(1)
    assert BlockRanges().ids() == []


def test_block_ranges_are_immutable() -> None:
    ranges = BlockRanges([(4, 2)])
    with pytest.raises(AttributeError):
        ranges.num_ranges = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ranges.other = 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        BlockRanges.ids = None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError):
        hash(ranges)
    with pytest.raises(TypeError):
        type("Sub", (BlockRanges,), {})
    assert ranges.truncated(1).ids() == [4]
    assert ranges.ids() == [4, 5]


def test_block_ranges_compare_by_value() -> None:
    assert BlockRanges([(4, 2), (6, 1)]) == BlockRanges([(4, 3)])
    assert BlockRanges([(4, 2)]) != BlockRanges([(4, 3)])
    assert BlockRanges() == BlockRanges([])
    assert BlockRanges([(4, 2)]) != [(4, 2)]
    assert BlockRanges([(4, 2)]) != 5
    with pytest.raises(TypeError):
        _ = BlockRanges() < BlockRanges()  # type: ignore[operator]


@pytest.mark.parametrize("cut", range(8))
def test_truncated_keeps_the_first_blocks(cut: int) -> None:
    ranges = BlockRanges([(4, 2), (9, 1), (1, 3)])
    assert ranges.truncated(cut).ids() == ranges.ids()[:cut]


def test_truncated_refuses_nonsense() -> None:
    ranges = BlockRanges([(4, 2)])
    for bad, error in ((-1, ValueError), (2**40, ValueError), (2**70, OverflowError)):
        with pytest.raises(error):
            ranges.truncated(bad)
    with pytest.raises(TypeError):
        ranges.truncated("1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        (5, TypeError),
        ([5], TypeError),
        ([(1,)], TypeError),
        ([(1, 2, 3)], TypeError),
        ([(1, "2")], TypeError),
        ([(1.0, 2)], TypeError),
        ([(-1, 2)], ValueError),
        ([(1, 0)], ValueError),
        ([(1, -2)], ValueError),
        ([(INT32_MAX, 2)], ValueError),
        ([(INT64_MAX, 1)], ValueError),
        ([(1, 2**40)], OverflowError),
        ([(1, INT32_MAX - 1), (1, INT32_MAX - 1)], ValueError),  # the sum would wrap around
    ],
)
def test_block_ranges_refuse_what_is_no_range(pairs: object, error: type) -> None:
    with pytest.raises(error):
        BlockRanges(pairs)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BlockRanges(ranges=[])  # type: ignore[call-arg]


# --- CoordMap ---------------------------------------------------------------------------------


def test_coord_map_is_a_bijection() -> None:
    shape = CoordMap(2, 3, 4, 5)
    assert shape.size == 24
    assert shape.size_bytes == 120
    coords = [(i, j, k) for i in range(2) for j in range(3) for k in range(4)]
    assert [shape.n(*c) for c in coords] == list(range(24))
    assert [shape.coord(n) for n in range(24)] == coords
    assert [shape.offset_bytes(*c) for c in coords] == [5 * n for n in range(24)]
    assert [shape.coord_of_offset(o) for o in range(120)] == [c for c in coords for _ in range(5)]


def test_coord_map_takes_keywords() -> None:
    assert CoordMap(layers=1, blocks=2, tokens_per_block=3, bytes_per_token=4).size_bytes == 24


def test_coord_map_refuses_what_is_out_of_bounds() -> None:
    shape = CoordMap(2, 3, 4, 5)
    for bad in ((2, 0, 0), (0, 3, 0), (0, 0, 4), (-1, 0, 0), (0, -1, 0), (0, 0, INT64_MAX)):
        with pytest.raises(ValueError, match="is outside"):
            shape.n(*bad)
        with pytest.raises(ValueError, match="is outside"):
            shape.offset_bytes(*bad)
    for bad_n in (-1, 24):
        with pytest.raises(ValueError, match="is outside"):
            shape.coord(bad_n)
    with pytest.raises(ValueError, match="is outside"):
        shape.coord_of_offset(120)
    with pytest.raises(TypeError):
        shape.n(0, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        shape.n(0, 0, 0.5)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        shape.coord(2**63)


@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (1, -1, 1, 1), (2**32, 2**31, 1, 1)])
def test_coord_map_refuses_impossible_shapes(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"not positive|overflows"):
        CoordMap(*shape)


# --- RegionMap --------------------------------------------------------------------------------


def test_a_range_is_one_span_in_each_region() -> None:
    regions = RegionMap([(1_000, 50, 8), (0, 50, 4)])
    assert len(regions) == 2
    blocks = BlockRanges([(0, 2), (3, 4), (20, 1)])  # two null blocks in front
    assert regions.spans(blocks) == [(0, 1_024, 32), (0, 1_160, 8), (1, 12, 16), (1, 80, 4)]
    assert regions.address(1, 20) == 80
    assert regions.locate(81) == (1, 20, 1)


def test_regions_are_checked() -> None:
    for bad in ([], [(0, 0, 1)], [(0, 10, 2), (19, 1, 1)], [(2**63 - 1, 2, 1)]):
        with pytest.raises(ValueError, match="region"):
            RegionMap(bad)
    for bad in (None, [1], [(1, 2)], [("0", 1, 1)]):
        with pytest.raises(TypeError):
            RegionMap(bad)
    regions = RegionMap([(0, 10, 4)])
    with pytest.raises(ValueError, match=r"block 10 is outside \[0, 10\) of region 0"):
        regions.spans(BlockRanges([(8, 3)]))
    with pytest.raises(ValueError, match="address 40 is in no region"):
        regions.locate(40)
