"""Our mover on the CPU leaves, bit for bit, what a naive copy and vLLM's function leave.

The same for the Triton kernel: ``tests/kernels/cases/check_block_moves.py``. Plans by themselves,
every list of copies over a small pool: ``csrc/tests/move_plan_test.cpp``.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu_model_runner as runner_module
from cache_layouts import BLOCKS, LAYOUTS, copied, same_bits, storage
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_tagma._native import BlockMover
from vllm_tagma.errors import SeamError, UnsupportedError
from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.worker.block_mover import SCRATCH_BYTES, HostMover, mover_of
from vllm_tagma.worker.cache_regions import CacheRegion, block_bytes, cache_regions

Copies = list[tuple[int, int]]

LISTS: dict[str, Copies] = {
    "one": [(3, 7)],
    "chain": [(3, 7), (9, 3), (2, 9)],
    "swap of runs": [*((i, i + 10) for i in range(2, 8)), *((i + 10, i) for i in range(2, 8))],
    "cycle with a branch": [(1, 2), (2, 3), (3, 1), (3, 9), (9, 10)],
    "overlapping runs down": [(i, i - 2) for i in range(5, 20)],
    "overlapping runs up": [(i, i + 3) for i in range(2, 20)],
    "every block": [(i, (i * 7 + 3) % BLOCKS) for i in range(BLOCKS)],
}


@st.composite
def copy_lists(draw: Any) -> Copies:
    """Distinct destinations in random order; sources that repeat, chain, swap and rotate."""
    destinations = draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS))
    if draw(st.booleans()):
        return list(zip(draw(st.permutations(destinations)), destinations, strict=True))
    return [(draw(st.integers(0, BLOCKS - 1)), to) for to in destinations]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LISTS)
def test_leaves_what_a_naive_copy_and_vllms_leave(name: str, layout: str) -> None:
    caches, copies = LAYOUTS[layout](), LISTS[name]
    stock = LAYOUTS[layout]()
    wanted = [copied(cache, copies) for cache in caches]
    mover_of(caches, BLOCKS).move([KVCacheBlockCopy(*copy) for copy in copies])
    copy_kv_cache_blocks_inplace(stock, BLOCKS, copies)
    for cache, expected, theirs in zip(caches, wanted, stock, strict=True):
        assert same_bits(cache, expected)
        assert same_bits(cache, theirs)
        # Whatever lies between the layers' parts moved as it did with vLLM's.
        assert torch.equal(storage(cache), storage(theirs))


@settings(max_examples=150, deadline=None)
@given(copies=copy_lists(), layout=st.sampled_from(sorted(LAYOUTS)), threads=st.integers(1, 3))
def test_random_copies(copies: Copies, layout: str, threads: int) -> None:
    caches = LAYOUTS[layout]()
    wanted = [copied(cache, copies) for cache in caches]
    BlockMover(BLOCKS, cache_regions(caches, BLOCKS)).move(copies, threads)
    assert all(map(same_bits, caches, wanted))


def test_a_wrong_copy_would_be_noticed() -> None:
    """One pair at a time, in the given order: the comparisons above are not idle."""
    caches, copies = LAYOUTS["layers in one storage"](), LISTS["overlapping runs up"]
    wanted = [copied(cache, copies) for cache in caches]
    mover = mover_of(caches, BLOCKS)
    for copy in copies:
        mover.move([copy])
    assert not all(map(same_bits, caches, wanted))


def test_large_copies_on_threads_while_python_runs() -> None:
    """Beyond the caches, where stores bypass them."""
    blocks = 400
    caches = [torch.randint(0, 9999, (blocks, 4, 1024), dtype=torch.int32) for _ in range(3)]
    copies = [(i, (i * 7 + 5) % blocks) for i in range(blocks)]
    wanted = [cache[[source for source, _ in copies]] for cache in caches]
    mover = BlockMover(blocks, cache_regions(caches, blocks))
    ran = threading.Event()
    threading.Thread(target=ran.set).start()
    mover.move(copies, 4)
    assert ran.wait(10)
    for cache, expected in zip(caches, wanted, strict=True):
        assert torch.equal(cache[[to for _, to in copies]], expected)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no list of threads")
def test_a_small_move_leaves_torchs_threads_running() -> None:
    """A smaller team than torch's ends the threads that it leaves over."""
    caches = [torch.zeros((400, 64), dtype=torch.uint8) for _ in range(2)]
    mover = BlockMover(400, cache_regions(caches, 400))
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.zeros(1 << 22).add_(1)
        before = set(os.listdir("/proc/self/task"))
        mover.move([(3, 7)], 4)
        time.sleep(0.2)  # threads that end take a moment
        assert before <= set(os.listdir("/proc/self/task"))
    finally:
        torch.set_num_threads(threads)


def test_no_temporary_that_grows_with_the_copies() -> None:
    """vLLM's function needs all that is copied once more, here 96 MiB."""
    blocks = 768
    whole = torch.ones((blocks, 2, 64 * 1024), dtype=torch.uint8)
    caches = list(whole.unbind(1))
    copies = [(i, (i + blocks // 2) % blocks) for i in range(blocks)]
    mover = BlockMover(blocks, cache_regions(caches, blocks))
    mover.move(copies[:2], 2)  # threads have started
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mover.move(copies, 2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 4 * 1024, f"{grown} KiB more than before"
    assert SCRATCH_BYTES == 32 * 1024
    copy_kv_cache_blocks_inplace(caches, blocks, copies)
    theirs = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert theirs > 64 * 1024, f"only {theirs} KiB: the measure above is idle"


def test_regions_are_as_few_as_the_strides_allow() -> None:
    sizes = {name: cache_regions(make(), BLOCKS) for name, make in LAYOUTS.items()}
    assert {name: len(regions) for name, regions in sizes.items()} == {
        "a storage per layer": 3,
        "layers in one storage": 3,
        "blocks of all layers side by side": 1,
        "the same, padded": 1,  # a storage that blocks fill is moved whole
        "smaller attention blocks": 2,
        "keys and values apart": 2,
        "keys and values apart, smaller attention blocks": 2,
        "heads before tokens": 1,
        "heads outermost": 4,
        "latents": 2,
        "dtypes and sizes of their own": 3,
        "a layer that shares another's cache": 1,
        "groups over one tensor": 2,
        "blocks larger than the scratch": 1,
    }
    assert block_bytes(sizes["latents"]) == 2 * 16 * 36 * 2
    part = torch.zeros((2 * BLOCKS, 8))[BLOCKS:]  # of a storage with something else in front
    assert cache_regions([part], BLOCKS) == [CacheRegion(part.data_ptr(), 32, 32)]
    joined = torch.zeros((BLOCKS + 1, 4, 8))[1:]
    assert cache_regions([joined[:, 2], joined[:, 1]], BLOCKS) == [
        CacheRegion(joined.data_ptr() + 32, 128, 64)
    ]


@pytest.mark.parametrize(
    ("caches", "what"),
    [
        ([torch.zeros(2, BLOCKS, 4)], r"shape \[2, 24, 4\] is not 24 blocks"),
        ([torch.zeros(())], r"shape \[\] is not 24 blocks"),
        ([[torch.zeros(BLOCKS, 4)]], "a KV cache is a list, not a tensor"),
        ([torch.zeros(BLOCKS + 8).unfold(0, 4, 1)[:BLOCKS]], r"strides \[1, 1\]"),
    ],
)
def test_memory_that_cannot_be_moved_is_refused(caches: Any, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what) as error:
        cache_regions(caches, BLOCKS)
    assert "--tagma-compaction off" in str(error.value)


def test_caches_that_overlap_otherwise_are_refused() -> None:
    memory = torch.zeros(64 * BLOCKS + 8)
    coarse = memory[: 32 * BLOCKS].view(BLOCKS, 32)
    for other in (
        memory[8 : 8 + 32 * BLOCKS].view(BLOCKS, 32),
        memory[: 16 * BLOCKS].view(BLOCKS, 16),
    ):
        with pytest.raises(UnsupportedError, match="KV caches overlap"):
            cache_regions([coarse, other], BLOCKS)


def test_refused_copies_change_nothing() -> None:
    cache = torch.arange(BLOCKS * 4).view(BLOCKS, 4)
    before = cache.clone()
    mover = mover_of([cache], BLOCKS)
    assert isinstance(mover, HostMover)
    for copies, what in (
        ([(1, 2), (3, BLOCKS)], "block 24 is outside the pool of 24 blocks"),
        ([(1, 2), (3, 2)], "block 2 is the destination of two copies"),
        ([(1, 2, 3)], "a copy has 3 numbers"),
    ):
        with pytest.raises(ValueError, match=what):
            mover.move(copies)  # type: ignore[arg-type]
    assert torch.equal(cache, before)


class _Step:
    def __init__(self, copies: Copies | None) -> None:
        self.kv_cache_block_copies = copies


def test_stands_for_vllms_function_while_a_step_runs() -> None:
    cache = torch.arange(BLOCKS * 4).view(BLOCKS, 4)
    copies = BlockCopies()
    wanted = copied(cache, [(1, 2), (2, 1)])
    with copies.stand_in(runner_module, _Step([(1, 2), (2, 1)])):
        runner_module.copy_kv_cache_blocks_inplace([cache], BLOCKS, [(1, 2), (2, 1)])
    assert copies.num_copies == 2
    assert torch.equal(cache, wanted)
    assert runner_module.copy_kv_cache_blocks_inplace is copy_kv_cache_blocks_inplace
    first = copies.mover([cache], BLOCKS)
    assert copies.mover([cache], BLOCKS) is first
    assert copies.mover([cache.clone()], BLOCKS) is not first
    with copies.stand_in(runner_module, _Step(None)):
        assert runner_module.copy_kv_cache_blocks_inplace is copy_kv_cache_blocks_inplace


def test_a_step_that_does_not_call_it_fails() -> None:
    copies = BlockCopies()
    with (
        pytest.raises(SeamError, match="1 block copies of a step without calling"),
        copies.stand_in(runner_module, _Step([(1, 2)])),
    ):
        copy_kv_cache_blocks_inplace([torch.zeros(BLOCKS, 4)], BLOCKS, [(1, 2)])
