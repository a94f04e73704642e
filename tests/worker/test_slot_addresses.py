"""Slots of tensors by address: the same as through numpy, refused where memory would be misread."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_tagma.errors import SeamError
from vllm_tagma.integration.block_table_v1 import _address
from vllm_tagma.worker.range_table import RangeTable

BLOCK_SIZE = 16


@pytest.mark.parametrize("seed", range(20))
def test_the_same_slots_and_lookups(seed: int) -> None:
    """Batches around the 64 rows that are tested together, decodes and prefills mixed."""
    rng = random.Random(seed)
    rows = rng.choice([1, 63, 64, 65, 150])
    table = RangeTable(max_rows=rows)
    starts, positions = [0], []
    for row in range(rows):
        ids: list[int] = []
        for _ in range(rng.randint(1, 3)):
            first = rng.choice([0, rng.randrange(1, 1 << 20)])  # 0: a run of null blocks
            count = rng.randint(1, 9)
            ids += [0] * count if first == 0 else range(first, first + count)
        table.append(row, ids)
        end = len(ids) * BLOCK_SIZE
        if rng.random() < 0.9:
            # Most decode at the end; some at any position, or outside every range.
            positions.append(rng.choice([end - 1, end - 1, rng.randrange(end), end, -1]))
        else:
            positions += range(rng.randrange(end), end)
        starts.append(len(positions))
    q = torch.tensor(starts, dtype=torch.int32)
    p = torch.tensor(positions, dtype=torch.int64)
    pad_to = len(positions) + 3
    expected = np.full(pad_to + 1, 7, dtype=np.int64)
    out = torch.full((pad_to + 1,), 7, dtype=torch.int64)
    lookups = table.compute_slots(
        q.numpy(), p.numpy(), expected, num_reqs=rows, pad_to=pad_to, block_size=BLOCK_SIZE
    )
    assert lookups == table.compute_slots_at(
        _address(q, torch.int32, rows + 1),
        _address(p, torch.int64, len(positions)),
        _address(out, torch.int64, pad_to),
        num_reqs=rows,
        num_tokens=len(positions),
        pad_to=pad_to,
        block_size=BLOCK_SIZE,
    )
    assert out.tolist() == expected.tolist()
    assert out[-1] == 7
    for row in range(rows):  # and one position at a time, through no batch at all
        for at in range(starts[row], starts[row + 1]):
            assert expected[at] == _slot(table.ranges(row), positions[at])


def _slot(ranges: list[tuple[int, int]], position: int) -> int:
    block = position // BLOCK_SIZE
    for start, count in ranges:
        if 0 <= block < count:
            return (start + block) * BLOCK_SIZE + position % BLOCK_SIZE if start else -1
        block -= count
    return -1


@pytest.mark.parametrize(
    ("tensor", "dtype", "length"),
    [
        (torch.zeros(4, dtype=torch.int64), torch.int32, 4),
        (torch.zeros(4, dtype=torch.int32), torch.int32, 5),
        (torch.zeros(8, dtype=torch.int32)[::2], torch.int32, 4),
        (torch.zeros(4, dtype=torch.int32, device="meta"), torch.int32, 4),
    ],
)
def test_what_would_be_misread_is_refused(
    tensor: torch.Tensor, dtype: torch.dtype, length: int
) -> None:
    with pytest.raises(SeamError, match=r"expected a contiguous CPU tensor of \d .*paged"):
        _address(tensor, dtype, length)
