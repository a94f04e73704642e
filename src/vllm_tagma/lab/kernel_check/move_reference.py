"""Block copies in plain Python and torch: what the mover must do, and what it is timed against.

``segments_of`` cuts copies as the native planner does (``csrc/tagma/move_plan.hpp``), for machines
that have only torch and Triton. ``gather_and_scatter`` is the way of vLLM's
``copy_kv_cache_blocks_inplace``: a temporary per cache tensor. ``copy_one_by_one`` is the meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_tagma.kernels.block_moves import FREE, ORDERED

Copies = Sequence[tuple[int, int]]


class Segments(NamedTuple):
    """What ``block_moves.send`` takes."""

    num_segments: int
    num_copies: int
    packed: npt.NDArray[np.int32]


def segments_of(copies: Copies, batch: int) -> Segments:
    """Copies in segments that share no block; free ones come ``batch`` to a segment."""
    source_of = {to: source for source, to in copies if source != to}
    readers: dict[int, list[int]] = {}
    for to, source in source_of.items():
        readers.setdefault(source, []).append(to)
    free = [to for to, source in source_of.items() if to not in readers and source not in source_of]
    members: list[tuple[int, list[int]]] = []  # kind, destinations in order

    def with_readers(block: int, ordered: list[int]) -> None:
        """``block`` is written; whoever reads it, and whoever reads those, comes first."""
        todo = [block]
        found: list[int] = []
        while todo:
            last = todo.pop()
            found.append(last)
            todo += [to for to in readers.get(last, []) if to not in cyclic]
        ordered += reversed(found)

    cyclic: set[int] = set()
    cycles = []
    for start in source_of:
        path, seen, block = [], set(), start
        while block in source_of and block not in seen and block not in cyclic:
            seen.add(block)
            path.append(block)
            block = source_of[block]
        if block in seen:
            cycle = path[path.index(block) :]
            cyclic.update(cycle)
            cycles.append(cycle)
    for cycle in cycles:
        ordered: list[int] = []
        for block in cycle:
            for to in readers[block]:
                if to not in cyclic:
                    with_readers(to, ordered)
        members.append((cycle[0], ordered + cycle))
    for to, source in source_of.items():
        if source not in source_of and to in readers:  # what a chain begins with
            ordered = []
            with_readers(to, ordered)
            members.append((ORDERED, ordered))
    members += [(FREE, free[i : i + batch]) for i in range(0, len(free), batch)]

    headers, at = [], 0
    for kind, blocks in members:
        headers += [at, at + len(blocks), kind]
        at += len(blocks)
    written = [to for _, blocks in members for to in blocks]
    packed = [*headers, *(source_of[to] for to in written), *written]
    return Segments(len(members), len(written), np.array(packed, dtype=np.int32))


def copy_one_by_one(cache: torch.Tensor, copies: Copies) -> torch.Tensor:
    """What ``cache`` ([blocks, ...]) holds after ``copies``: each from an untouched original."""
    after = cache.clone()
    for source, to in copies:
        after[to] = cache[source]
    return after


def gather_and_scatter(
    caches: Iterable[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor
) -> None:
    """Copies blocks of each cache by way of a temporary. ``sources``, ``destinations``: int64."""
    for cache in caches:
        cache[destinations] = cache[sources]
