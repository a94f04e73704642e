"""Runs that adjoin on both sides, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tagma.transfer.joint_runs import joint_runs


def pairs_of(runs):
    return [
        (int(local) + i, int(remote) + i)
        for local, remote, count in zip(*runs, strict=True)
        for i in range(count)
    ]


@st.composite
def transfers(draw):
    """Stretches of blocks on both sides, some backwards, some one after the other."""
    local: list[int] = []
    remote: list[int] = []
    at, there = draw(st.integers(0, 5)), draw(st.integers(0, 200))
    for _ in range(draw(st.integers(0, 8))):
        count = draw(st.integers(1, 6))
        ours, theirs = list(range(at, at + count)), list(range(there, there + count))
        if draw(st.booleans()):
            ours.reverse()
        if draw(st.booleans()):
            theirs.reverse()
        local += ours
        remote += theirs
        at += count + draw(st.integers(0, 2))
        there = draw(st.sampled_from([there + count, draw(st.integers(0, 200))]))
    order = draw(st.sampled_from(["as is", "backwards", "shuffled"]))
    pairs = list(zip(local, remote, strict=True))
    if order == "backwards":
        pairs.reverse()
    elif order == "shuffled":
        pairs = draw(st.permutations(pairs))
    return [a for a, _ in pairs], [b for _, b in pairs]


@given(transfers())
def test_runs_pair_what_the_lists_pair_in_the_fewest_pieces(transfer):
    local, remote = transfer
    runs = joint_runs(local, remote)
    pairs = set(zip(local, remote, strict=True))
    assert sorted(pairs_of(runs)) == sorted(pairs)
    starts = {(a, b) for a, b in pairs if (a - 1, b - 1) not in pairs}
    assert set(zip(runs.local.tolist(), runs.remote.tolist(), strict=True)) == starts
    assert runs.num_runs == len(starts)
    assert list(runs.local) == sorted(runs.local)
    assert all(array.dtype == np.int64 for array in runs)


def test_a_range_on_both_sides_is_one_run():
    assert joint_runs(range(7, 107), range(900, 1000)) == ([7], [900], [100])


def test_a_stretch_that_both_sides_hold_backwards_is_one_run():
    assert joint_runs([9, 8, 7], [5, 4, 3]) == ([7], [3], [3])
    assert joint_runs([9, 8, 7], [3, 4, 5]).num_runs == 3, "backwards on one side only"


def test_no_blocks_are_no_runs():
    assert joint_runs([], []).num_runs == 0


@pytest.mark.parametrize(("local", "remote"), [([1, 2], [1]), ([[1, 2]], [[1, 2]])])
def test_sides_that_do_not_pair_are_refused(local, remote):
    with pytest.raises(ValueError, match="are paired with"):
        joint_runs(local, remote)
