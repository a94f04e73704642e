"""The self-test of the Triton kernels: sources broken on purpose are caught, by name."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from self_test_subjects import subject_of

from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import InvariantError, SelfTestError
from vllm_tagma.kernels import (
    attention_kernels,
    block_moves,
    device_range_tables,
    expansion,
    range_attention,
    slot_mapping,
)
from vllm_tagma.worker import self_test_device, staged_range_tables
from vllm_tagma.worker.first_steps import FirstSteps
from vllm_tagma.worker.self_test import BUDGET_SECONDS, run_checks
from vllm_tagma.worker.self_test_attention import AttentionLayer, attention_checks
from vllm_tagma.worker.self_test_device import DEVICE_CHECKS, GRAPH_CHECKS
from vllm_tagma.worker.staged_range_tables import RowEnd, StagedRangeTables


def _checks(device: str) -> Any:
    return (*DEVICE_CHECKS, *(GRAPH_CHECKS if device == "cuda" else ()))


def check_what_is_right_passes_within_the_budget(device: str) -> None:
    run_checks(_checks(device), subject_of(device, interpreted=True))  # compiles
    begin = time.perf_counter()
    seconds = run_checks(_checks(device), subject_of(device, interpreted=True))
    assert sum(seconds.values()) <= time.perf_counter() - begin
    if device == "cuda":
        assert sum(seconds.values()) < BUDGET_SECONDS


def _broken(module: ModuleType, right: str, wrong: str, folder: Path) -> ModuleType:
    """The module with one piece of its source replaced."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1, f"{source.count(right)} places in {module.__name__}: {right}"
    path = folder / f"broken_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = broken  # dataclasses look there
    spec.loader.exec_module(broken)
    return broken


def _layer(device: str) -> AttentionLayer:
    """Tokens outside heads, as vLLM lays a cache out by default."""
    cache = torch.empty((3, 16, 2, 64), device=device).transpose(1, 2)
    return AttentionLayer(
        group=1,
        heads=4,
        cache=cache,
        query_dtype=torch.float32,
        scale=0.2,
        window=0,
        soft_cap=0.0,
        sinks=None,
    )


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("slot = shift * BLOCK_SIZE + key_pos", "slot = shift * BLOCK_SIZE + i", "request 0 of 3"),
        ("(start - cum).to(tl.int64)", "start.to(tl.int64)", "request 1 of 6 blocks"),
        ("served = (index >= 0) & (index < rows)", "served = index < rows", "without a row"),
    ],
)
def check_broken_attention_is_caught_by_name(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    right: str,
    wrong: str,
    says: str,
) -> None:
    subject = subject_of(device, interpreted=True)
    run_checks(attention_checks(_layer(device)), subject)
    broken = _broken(attention_kernels, right, wrong, tmp_path)
    monkeypatch.setattr(range_attention, "attention_kernels", broken)
    with pytest.raises(SelfTestError) as error:
        run_checks(attention_checks(_layer(device)), subject)
    assert "attention over ranges, group 1, decode (Triton): " in str(error.value)
    assert says in str(error.value)


BREAKS = {
    "row writes (Triton)": (
        device_range_tables,
        "entry = row * MAX_RANGES + first + lane",
        "entry = row * MAX_RANGES + lane",
        r"group 0, row \d, (block|number of blocks) \d+: ",
    ),
    "slot mapping (Triton)": (
        slot_mapping,
        "tl.where(block >= cum, here, slot)",
        "tl.where(block > cum, here, slot)",
        r"group 0, slot of token \d+: -?\d+ by the kernel, \d+ by the reference",
    ),
    "expansion (Triton)": (
        expansion,
        "tl.where(block >= cum, here, ids)",
        "tl.where(block > cum, here, ids)",
        r"table of group 0, entry \[\d, \d+\]: \d+ by the kernel, \d+ by the reference",
    ),
    "block moves": (
        block_moves,
        "saved[None, :], items)",
        "items, items)",
        r"cache 0 of shape .*, block \d+, byte \d+: \d+ by the mover, \d+ by the reference",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def check_a_broken_kernel_is_named(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, right, wrong, what = BREAKS[name]
    broken = _broken(module, right, wrong, tmp_path)
    subject = subject_of(device, interpreted=True)
    if module is block_moves:
        monkeypatch.setattr(subject.mover, "_kernels", broken)
        # With a batch as long as the cycle, everything is read before anything is written.
        monkeypatch.setattr(broken, "BATCH", 2)
    elif module is device_range_tables:
        monkeypatch.setattr(staged_range_tables, "DeviceRangeTables", broken.DeviceRangeTables)
    else:
        launcher = {slot_mapping: "compute_slot_mappings", expansion: "expand_block_tables"}[module]
        monkeypatch.setattr(self_test_device, launcher, getattr(broken, launcher))
    with pytest.raises(SelfTestError) as error:
        run_checks(_checks(device), subject)
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("  ")]
    assert lines, error.value
    assert re.match(rf"{re.escape(name)}: {what}", lines[0]), lines


class _Rows:
    """Two rows of one group on the device, and a step over them."""

    def __init__(self, device: str) -> None:
        self.tables = StagedRangeTables(groups=1, rows=4, device=device)
        self.tables.write(1, [RowEnd(0, 0, BlockRanges([(5, 3)]))])
        self.tables.write(3, [RowEnd(0, 0, BlockRanges([(0, 1), (9, 2)]))])
        self.tables.apply_staged_writes()
        self.index = torch.tensor([3, 1, -1], dtype=torch.int32, device=device)
        self.starts = torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=device)
        self.positions = torch.tensor([3, 17, 47, 0], device=device)
        self.slots = torch.zeros((1, 9), dtype=torch.int64, device=device)
        slot_mapping.compute_slot_mappings(
            self.tables.tables,
            self.index,
            self.starts,
            self.positions,
            block_sizes=torch.tensor([16], dtype=torch.int32, device=device),
            enabled=torch.tensor([True], device=device),
            out=self.slots,
        )

    def look(self, first: FirstSteps) -> None:
        first.look(
            index=self.index,
            starts=self.starts,
            positions=self.positions,
            slots=self.slots,
            rows=self.tables.all_ranges,
            block_sizes=[16],
            enabled=[True],
        )


def check_the_first_steps_are_compared(device: str) -> None:
    rows, first = _Rows(device), FirstSteps(2, "row {}".format)
    assert rows.slots[0].tolist() == [-1, 9 * 16 + 1, 7 * 16 + 15, -1, *[-1] * 5]
    for _ in range(2):
        assert not first.is_over
        rows.look(first)
        if device == "cuda":
            torch.cuda.synchronize()
    rows.look(first)
    assert (first.is_over, first.compared) == (True, 2)
    rows.slots[0, 2] = 4
    rows.look(first)  # nobody looks any more


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (2, "row 1, position 47: slot 4 by the kernel, 127 by the ids .1 of 1 differ, step 1"),
        (0, "row 3, position 3: slot 4 by the kernel, -1 by the ids"),
        (7, "slots behind the step's tokens are not -1"),
    ],
)
def check_a_slot_that_differs_ends_the_engine(device: str, at: int, what: str) -> None:
    rows, always = _Rows(device), FirstSteps(None, "row {}".format)
    rows.look(always)
    if device == "cuda":
        torch.cuda.synchronize()
    rows.slots[0, at] = 4

    def later_steps() -> None:
        for _ in range(8):
            rows.look(always)

    with pytest.raises(InvariantError, match=what):
        later_steps()
