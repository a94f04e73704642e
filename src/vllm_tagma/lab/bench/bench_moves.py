"""Block copies of a step on the CPU: our mover against vLLM's function, on the same caches.

On one core, as all scenarios: the process is pinned. Both share their work among threads.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_tagma.lab.bench.bench_plan import Effort, Planned
from vllm_tagma.lab.bench.bench_timing import BenchError, Measure, timed_calls

if TYPE_CHECKING:
    import torch

GROUP = "block_moves"
LAYERS = 4
BLOCK_BYTES = 16 * 1024
"""Of a block in a layer: 16 tokens, 2 KV heads of 128, 16 bits, keys and values."""

Copies = list[tuple[int, int]]


def move_scenarios(effort: Effort) -> list[Planned]:
    """Scattered blocks, whole ranges, exchanges; one layout more for the scattered ones."""
    cases = {
        "scattered_512": ("512 scattered blocks", 512, _scattered, False),
        "scattered_512_side_by_side": ("512 blocks, layers side by side", 512, _scattered, True),
        "scattered_4096": ("4,096 scattered blocks", 4096, _scattered, False),
        "ranges_512": ("512 blocks in 8 ranges", 512, _ranges, False),
        "ranges_4096": ("4,096 blocks in 8 ranges", 4096, _ranges, False),
        "exchanges_512": ("512 blocks in exchanged ranges", 512, _exchanges, False),
    }
    return [
        Planned(
            name=f"{GROUP}/{name}",
            group=GROUP,
            title=f"copy {title} of {LAYERS} x 16 KiB, one thread each",
            iterations=1,
            baseline="vllm",
            target=4.0,
            note="The list of copies is read and planned within the time.",
            rounds=8,
            quick=count <= 512,
            open=functools.partial(_open, make, count, side_by_side),
        )
        for name, (title, count, make, side_by_side) in cases.items()
    ]


def _scattered(count: int) -> Copies:
    ids = random.Random(count).sample(range(1, 2 * count + 64), 2 * count)
    return list(zip(ids[:count], ids[count:], strict=True))


def _ranges(count: int) -> Copies:
    """Each range to a hole of its length, a little further on."""
    length = count // 8
    starts = [1 + i * 2 * (length + 3) for i in range(8)]
    return [(start + i, start + length + 3 + i) for start in starts for i in range(length)]


def _exchanges(count: int) -> Copies:
    ranges = _ranges(count // 2)
    return ranges + [(to, source) for source, to in ranges]


@contextmanager
def _open(
    make: Callable[[int], Copies], count: int, side_by_side: bool
) -> Iterator[dict[str, Measure]]:
    import torch
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    from vllm_tagma.worker.block_mover import mover_of

    copies = make(count)
    blocks = 2 * count + 64
    shape = (2, 16, 2, 128)
    if side_by_side:
        whole = torch.empty((blocks, LAYERS, *shape), dtype=torch.bfloat16)
        caches = list(whole.unbind(1))
    else:
        caches = [torch.empty((blocks, *shape), dtype=torch.bfloat16) for _ in range(LAYERS)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the process is pinned to one CPU
    mover = mover_of(caches, blocks)

    def ours() -> None:
        mover.move(copies)

    def theirs() -> None:
        copy_kv_cache_blocks_inplace(caches, blocks, copies)

    try:
        if _left_by(ours, caches, copies) != _left_by(theirs, caches, copies):
            raise BenchError("our mover and vLLM's function leave different blocks")
        yield {
            "tagma": functools.partial(timed_calls, ours, iterations=1),
            "vllm": functools.partial(timed_calls, theirs, iterations=1),
        }
    finally:
        torch.set_num_threads(threads)


def _left_by(
    call: Callable[[], None], caches: list[torch.Tensor], copies: Copies
) -> list[list[int]]:
    """The first element of each destination, in each layer, of blocks that were numbered before."""
    for layer, cache in enumerate(caches):
        for block, content in enumerate(cache):
            content.fill_((block * 7 + layer) % 251)
    call()
    return [[int(cache[to, 0, 0, 0, 0]) for _, to in copies] for cache in caches]
