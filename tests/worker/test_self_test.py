"""The self-test finds no fault in what is right, and names each kernel that was broken on purpose.

Here the C++ paths of Model Runner V1; the Triton kernels of V2 are broken in their sources, in
``tests/kernels/cases/check_self_test.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cache_layouts import BLOCKS, LAYOUTS
from self_test_subjects import subject_of
from vllm.v1.worker.block_table import BlockTable

from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import InvariantError, SelfTestError
from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.integration.block_table_v1 import adopt_block_table
from vllm_tagma.worker import self_test_host
from vllm_tagma.worker.range_table import RangeTable
from vllm_tagma.worker.reference import compute_slots
from vllm_tagma.worker.self_test import BUDGET_SECONDS, Check, Subject, run_checks, slots_of
from vllm_tagma.worker.self_test_host import HOST_CHECKS
from vllm_tagma.worker.self_test_moves import BLOCK_MOVES

NAMES = ["row writes (C++)", "slot mapping (C++)", "expansion (C++)", "block moves"]


def test_what_is_right_passes_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    subject = subject_of()
    with caplog.at_level(logging.INFO, logger="vllm.tagma.worker"):
        seconds = run_checks(HOST_CHECKS, subject)
    assert list(seconds) == NAMES
    assert sum(seconds.values()) < BUDGET_SECONDS
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("self-test passed on cpu (")
    assert "(budget 3 s): row writes (C++) 0." in line
    assert not any(cache.any() for cache in subject.kv_caches), "blocks were left as they were"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_pass_on_every_layout_of_caches(layout: str) -> None:
    caches = LAYOUTS[layout]()
    for cache in caches:
        cache.zero_()
    run_checks([BLOCK_MOVES], subject_of(kv_caches=caches, num_blocks=BLOCKS))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 3, "kv_caches": [torch.zeros(3, 8)]},  # too small a pool for moves
        {"rows": 1, "max_tokens": 1, "block_sizes": [128], "widths": [1]},
        {"rows": 300, "max_tokens": 8192, "block_sizes": [16], "widths": [9000]},
    ],
)
def test_small_and_large_shapes_pass(changes: dict[str, Any]) -> None:
    subject = subject_of(**changes)
    run_checks(HOST_CHECKS, subject)
    assert max(len(BlockRanges.from_ids(ids.tolist()).ranges()) for ids in subject.ids[0]) <= 256


def test_the_reference_says_what_the_specification_says() -> None:
    subject = subject_of(block_sizes=[16], widths=[100])
    batch = subject.batch
    rows = [subject.ids[0][row].tolist() for row in batch.rows]
    tokens = len(batch.positions)
    slots = compute_slots(
        rows, batch.starts.tolist(), batch.positions, block_size=16, pad_to=tokens
    )
    assert np.array_equal(subject.slots(0), slots)
    assert slots_of(np.array([7, 0]), np.array([-1, 3, 20, 40]), 16).tolist() == [-1, 115, -1, -1]


class _OffByOne(RangeTable):
    """Slots of the block behind."""

    def compute_slots(self, *args: Any, **kwargs: Any) -> int:
        looked = super().compute_slots(*args, **kwargs)
        out = args[2]
        out[out >= 0] += kwargs["block_size"]
        return looked


class _Forgetful(RangeTable):
    """A second write that begins inside a range loses a block."""

    def write(self, row: int, first_block: int, ranges: BlockRanges) -> int:
        return super().write(row, max(first_block - 1, 0), ranges)


class _Late:
    """Ids one place too far behind."""

    @staticmethod
    def from_ids(ids: Any) -> Any:
        class Ranges:
            def write_ids(self, out: Any, at: int) -> None:
                BlockRanges.from_ids(ids).write_ids(out, at + 1)

        return Ranges()


class _OneByOne:
    """A mover that reads what it has overwritten."""

    def __init__(self, subject: Subject) -> None:
        self._mover = subject.mover
        assert self._mover is not None
        self.block_bytes = self._mover.block_bytes

    def move(self, copies: Any) -> None:
        for copy in copies:
            self._mover.move([copy])  # type: ignore[union-attr]


def _broken_mover(subject: Subject) -> Subject:
    return subject_of(kv_caches=subject.kv_caches, mover=_OneByOne(subject))


@pytest.mark.parametrize(
    ("name", "what", "attribute", "value"),
    [
        ("row writes (C++)", r"group 0, row 0, range \d+: ", "RangeTable", _Forgetful),
        ("slot mapping (C++)", r"group 0, slot of token \d+: \d+ by the", "RangeTable", _OffByOne),
        ("expansion (C++)", r"group 0, row 0, block 1: -77 by the kernel", "BlockRanges", _Late),
        (
            "block moves",
            r"cache 0 of shape \[200, 2, 16, 2, 8\], block \d+, byte \d+: ",
            None,
            None,
        ),
    ],
)
def test_a_broken_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, what: str, attribute: str | None, value: Any
) -> None:
    subject = subject_of()
    if attribute is None:
        subject = _broken_mover(subject)
    else:
        monkeypatch.setattr(self_test_host, attribute, value)
        if attribute == "BlockRanges":  # which only the expansion reads ids with
            checks: Any = [check for check in HOST_CHECKS if check.name == name]
            with pytest.raises(SelfTestError, match=what):
                run_checks(checks, subject)
            return
    with pytest.raises(SelfTestError, match=rf"{name.split(' (')[0]}.*: {what}") as error:
        run_checks(HOST_CHECKS, subject)
    text = str(error.value)
    assert "kernels wrong on cpu (" in text
    assert "Please report these lines" in text
    assert "--kv-cache-backend paged" in text
    assert not any(cache.any() for cache in subject.kv_caches)


def test_all_failures_are_named_at_once_and_crashes_too() -> None:
    def crash(_: Subject) -> None:
        raise RuntimeError("no such instruction")

    checks = [Check("attention", crash), BLOCK_MOVES]
    with pytest.raises(SelfTestError, match="found 2 of 2 kernels wrong") as error:
        run_checks(checks, _broken_mover(subject_of()))
    assert "attention: failed with RuntimeError('no such instruction')" in str(error.value)


def _table(first_steps: int | None) -> BlockTable:
    table = BlockTable(32, 4, 16, 64, False, torch.device("cpu"), 32)
    adopt_block_table(table, request_of=lambda _: None, audit=None, first_steps=first_steps)
    table.add_row([5, 6, 9], 0)
    table.commit_block_table(1)
    return table


@pytest.mark.parametrize("steps", [2, None])
def test_the_first_steps_are_compared_with_the_ids(steps: int | None) -> None:
    starts, positions = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([31, 32, 95])
    map_slots: Callable[[BlockTable], None] = lambda table: table.compute_slot_mapping(  # noqa: E731
        1, starts, positions
    )
    table = _table(steps)
    for _ in range(2):
        map_slots(table)
    assert table.slot_mapping.gpu[:3].tolist() == [5 * 32 + 31, 6 * 32, 9 * 32 + 31]
    table.block_table.gpu[0, 1] = 7  # what attention reads is not what was written
    if steps is None:
        with pytest.raises(InvariantError, match="position 32: slot 192 by range arithmetic, 224"):
            map_slots(table)
    else:
        map_slots(table)  # the test is over
    assert BlockCopies().num_copies == 0
