"""Transfers through the real NIXL, posted as runs: the bytes of vLLM's own, in fewer pieces."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tagma.integration.transfer.run_agent import BlockSelection, RunAgent

REGIONS, BLOCKS, SIZE = 5, 64, 96


class Figures:
    """What was recorded, call by call."""

    def __init__(self):
        self.runs, self.unmerged, self.preparations = [], [], []

    def record_runs(self, **figures):
        self.runs.append(figures)

    def record_unmerged(self, **figures):
        self.unmerged.append(figures)

    def record_preparation(self, seconds):
        self.preparations.append(seconds)


def selection(groups):
    """Groups of (regions, block ids): each region at its place among ``REGIONS`` of ``BLOCKS``."""
    pairs = [
        (np.array(regions, dtype=np.int64) * BLOCKS, np.array(ids, dtype=np.int64))
        for regions, ids in groups
    ]
    return BlockSelection(
        pairs, lambda: np.concatenate([(o[:, None] + ids).ravel() for o, ids in pairs])
    )


class Transfer:
    """Both sides prepared as vLLM does; the local side through a ``RunAgent``."""

    def __init__(self, peers, *, strided=False, change=lambda table: table):
        self.local, self.remote = peers(regions=REGIONS, blocks=BLOCKS, block_bytes=SIZE)
        self.remote.memory[:] = np.random.default_rng(1).integers(
            0, 256, self.remote.memory.shape, dtype=np.uint8
        )
        self.figures = Figures()
        self.agent = RunAgent(self.local.agent, self.figures)
        self.handles = [
            self.prepare("NIXL_INIT_AGENT", self.local, strided, change),
            self.prepare(self.local.meet(self.remote), self.remote, strided, lambda table: table),
        ]

    def prepare(self, name, peer, strided, change):
        if strided:
            first = [region.ctypes.data for region in peer.memory]
            rows = [(address, SIZE, 0, SIZE, BLOCKS) for address in first]
            return self.agent.prep_xfer_dlist(name, np.array(rows, dtype=np.uint64), "DRAM")
        listed = self.agent.get_xfer_descs(change(peer.table()), "DRAM")
        return self.agent.prep_xfer_dlist(name, listed)

    def read(self, local, remote):
        handle = self.agent.make_prepped_xfer(
            "READ", self.handles[0], local, self.handles[1], remote, notif_msg=b"done"
        )
        return self.local.finish(handle)

    def write(self, local, remote):
        handle = self.agent.make_prepped_xfer(
            "WRITE", self.handles[0], local, self.handles[1], remote, notif_msg=b"done"
        )
        return self.local.finish(handle)


OURS = [9, 10, 11, 12, 30, 29, 28, 3, 50]
THEIRS = [40, 41, 42, 43, 7, 6, 5, 8, 20]
RUNS = 4  # 9-12, 28-30 backwards on both sides, 3, 50


@pytest.mark.parametrize("strided", [False, True], ids=["vllm-0.32", "vllm-0.33"])
def test_a_pull_reads_what_its_blocks_name(peers, strided):
    transfer = Transfer(peers, strided=strided)
    everywhere = range(REGIONS)
    figures = transfer.read(selection([(everywhere, OURS)]), selection([(everywhere, THEIRS)]))
    expected = np.zeros_like(transfer.local.memory)
    expected[:, OURS] = transfer.remote.memory[:, THEIRS]
    assert np.array_equal(transfer.local.memory, expected)
    assert figures.descCount == RUNS * REGIONS
    assert figures.totalBytes == len(OURS) * REGIONS * SIZE
    assert transfer.figures.runs == [
        {
            "blocks": len(OURS),
            "runs": RUNS,
            "descriptors": RUNS * REGIONS,
            "num_bytes": figures.totalBytes,
        }
    ]
    assert transfer.figures.unmerged == []
    assert len(transfer.figures.preparations) == 1
    assert transfer.remote.hears() == [b"done"]


def test_a_push_writes_what_its_blocks_name(peers):
    transfer = Transfer(peers)
    transfer.local.memory[:] = 255 - transfer.remote.memory
    before = transfer.remote.memory.copy()
    transfer.write(selection([(range(REGIONS), OURS)]), selection([(range(REGIONS), THEIRS)]))
    before[:, THEIRS] = transfer.local.memory[:, OURS]
    assert np.array_equal(transfer.remote.memory, before)


def test_groups_with_regions_of_their_own(peers):
    transfer = Transfer(peers)
    transfer.read(
        selection([([0, 2], [5, 6, 7]), ([1, 3, 4], [20, 21])]),
        selection([([0, 2], [9, 10, 11]), ([1, 3, 4], [61, 60])]),
    )
    expected = np.zeros_like(transfer.local.memory)
    for region in (0, 2):
        expected[region, [5, 6, 7]] = transfer.remote.memory[region, [9, 10, 11]]
    for region in (1, 3, 4):
        expected[region, [20, 21]] = transfer.remote.memory[region, [61, 60]]
    assert np.array_equal(transfer.local.memory, expected)
    (figures,) = transfer.figures.runs
    assert (figures["blocks"], figures["runs"], figures["descriptors"]) == (5, 3, 2 * 1 + 3 * 2)


def gaps(table):
    """Only the first half of each block, as where several layers share one."""
    table = table.copy()
    table[:, 1] //= 2
    return table


TWO = selection([(range(5), [1, 2])])


@pytest.mark.parametrize(
    ("local", "remote", "reason"),
    [
        (TWO, np.arange(10), "not_blocks"),
        (TWO, selection([(range(5), [1]), (range(5), [2])]), "sides_differ"),
        (selection([([0, 1], [1, 2])]), selection([([0, 1, 2, 3], [1])]), "sides_differ"),
    ],
)
def test_what_cannot_be_merged_goes_as_vllm_would_send_it(peers, local, remote, reason):
    transfer = Transfer(peers)
    transfer.read(local, remote)
    expected = np.zeros_like(transfer.local.memory).reshape(-1, SIZE)
    expected[np.asarray(local)] = transfer.remote.memory.reshape(-1, SIZE)[np.asarray(remote)]
    assert np.array_equal(transfer.local.memory.reshape(-1, SIZE), expected)
    assert transfer.figures.unmerged == [{"reason": reason, "descriptors": len(local)}]
    assert transfer.figures.runs == []


def test_blocks_with_gaps_go_as_vllm_would_send_them(peers):
    transfer = Transfer(peers, change=gaps)
    half = transfer.agent.prep_xfer_dlist(
        transfer.local.meet(transfer.remote),
        transfer.agent.get_xfer_descs(gaps(transfer.remote.table()), "DRAM"),
    )
    transfer.handles[1] = half
    transfer.read(selection([(range(REGIONS), OURS)]), selection([(range(REGIONS), THEIRS)]))
    expected = np.zeros_like(transfer.local.memory)
    expected[:, OURS, : SIZE // 2] = transfer.remote.memory[:, THEIRS, : SIZE // 2]
    assert np.array_equal(transfer.local.memory, expected)
    assert transfer.figures.unmerged == [{"reason": "layout", "descriptors": len(OURS) * REGIONS}]


def test_a_block_outside_its_region_is_an_error(peers):
    """As an index it would name the first block of the next region."""
    transfer = Transfer(peers)
    with pytest.raises(ValueError, match=r"outside \[0, 64\) of region 0"):
        transfer.read(selection([(range(REGIONS), [BLOCKS])]), selection([(range(REGIONS), [1])]))
    assert not transfer.local.memory.any()


def test_released_lists_are_forgotten(peers):
    transfer = Transfer(peers)
    transfer.agent.release_dlist_handle(transfer.handles[0])
    assert list(transfer.agent._prepared) == transfer.handles[1:]
