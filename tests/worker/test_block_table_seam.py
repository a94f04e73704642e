"""vLLM's real BlockTable, converted, against an untouched one with vLLM's own C++ slot kernel."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _compute_slot_mapping_kernel_impl
from vllm.v1.worker import block_table as vllm_block_table
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable, SlotMappingMode

from vllm_tagma.errors import InvariantError, RangeCapError, SeamError, UnsupportedError
from vllm_tagma.integration.block_table_v1 import TagmaBlockTable, adopt_block_table
from vllm_tagma.integration.worker_v1 import TagmaCPUModelRunner
from vllm_tagma.ranges import encode
from vllm_tagma.worker.slot_audit import SlotAudit

ROWS = 8
BLOCKS = 320
TOKENS = 512
BLOCK_SIZE = 32
OPERATIONS = 60


class _Launch:
    """Stands where the runner's registration puts vLLM's CPU kernel: a call like Triton's."""

    def register_warmup(self, **_: object) -> None:
        pass

    def __call__(self, num_reqs: int, *args: object) -> None:
        _compute_slot_mapping_kernel_impl(*args)


@pytest.fixture(autouse=True)
def cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    current_platform.import_kernels()
    monkeypatch.setattr(vllm_block_table, "_COMPUTE_SLOT_MAPPING_KERNEL", _Launch())


def stock_table(*, mode: SlotMappingMode = SlotMappingMode.TOKEN_TO_KV_SLOT) -> BlockTable:
    return BlockTable(
        BLOCK_SIZE, ROWS, BLOCKS, TOKENS, False, torch.device("cpu"), 1, slot_mapping_mode=mode
    )


def nobody(row: int) -> None:
    """No row belongs to a request here."""


def tagma_table(*, audit: SlotAudit | None = None, aliased: bool = False) -> TagmaBlockTable:
    table = stock_table()
    if aliased:  # what the CPU runner does to its placeholder batch
        table.block_table.gpu = table.block_table.cpu
        table.slot_mapping.gpu = table.slot_mapping.cpu
    adopt_block_table(table, request_of=nobody, audit=audit)
    return table


def block_runs(rng: random.Random, *, most: int) -> list[int]:
    """A few ascending runs of non-null block ids, ``most`` blocks at most."""
    block_ids: list[int] = []
    while len(block_ids) < most and rng.random() < 0.8:
        start = rng.randrange(1, 10_000)
        block_ids += range(start, start + rng.randrange(1, 12))
    return block_ids[:most]


def operations(rng: random.Random, count: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Calls as the input batch makes them; rows keep within the table's width."""
    lengths = [0] * ROWS
    for _ in range(count):
        a, b = rng.sample(range(ROWS), 2)
        operation = rng.choice(["append", "append", "add", "clear_row", "move", "swap"])
        if operation == "append":
            block_ids = block_runs(rng, most=BLOCKS - lengths[a])
            lengths[a] += len(block_ids)
            yield "append_row", (block_ids, a)
        elif operation == "add":
            block_ids = block_runs(rng, most=BLOCKS)
            lengths[a] = len(block_ids)
            yield "add_row", (block_ids, a)
        elif operation == "clear_row":
            lengths[a] = 0
            yield "clear_row", (a,)
        elif operation == "move":
            lengths[b], lengths[a] = lengths[a], 0
            yield "move_row", (a, b)
        else:
            lengths[a], lengths[b] = lengths[b], lengths[a]
            yield "swap_row", (a, b)


def random_batch(rng: random.Random, table: BlockTable) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Decode tokens and prefill chunks inside the rows' blocks."""
    num_reqs = rng.randrange(1, ROWS + 1)
    starts, positions = [0], []
    for row in range(num_reqs):
        length = int(table.num_blocks_per_row[row]) * BLOCK_SIZE
        if length:
            first = rng.randrange(length)
            positions += range(first, min(length, first + rng.choice([1, 1, 5, 60])))
        starts.append(len(positions))
    return (
        num_reqs,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int64),
    )


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_same_rows_and_slots_as_stock(seed: int, aliased: bool) -> None:
    rng = random.Random(seed)
    audit = SlotAudit()
    stock, tagma = stock_table(), tagma_table(audit=audit, aliased=aliased)
    tokens = 0
    for name, args in operations(rng, OPERATIONS):
        getattr(stock, name)(*args)
        getattr(tagma, name)(*args)
        np.testing.assert_array_equal(tagma.block_table.np, stock.block_table.np)
        np.testing.assert_array_equal(tagma.num_blocks_per_row, stock.num_blocks_per_row)
        for row, used in enumerate(stock.num_blocks_per_row):
            ids = stock.block_table.np[row, :used].tolist()
            assert tagma.ranges.ranges(row) == encode(ids)
        num_reqs, starts, positions = random_batch(rng, stock)
        for table in (stock, tagma):
            table.commit_block_table(num_reqs)
            table.slot_mapping.gpu.fill_(-7)
            table.compute_slot_mapping(num_reqs, starts, positions)
        # The whole buffer: neither kernel writes behind the batch.
        assert torch.equal(tagma.slot_mapping.gpu, stock.slot_mapping.gpu)
        tokens += len(positions)
    assert audit.counters() == {"batches": OPERATIONS, "slots": tokens, "padded": 0}
    assert tokens > 200


def test_adopting_keeps_rows_and_buffers() -> None:
    table = stock_table()
    table.add_row([5, 6, 9], 2)
    buffers = (table.block_table, table.slot_mapping)
    adopt_block_table(table, request_of=nobody, audit=None)
    assert isinstance(table, TagmaBlockTable)
    assert table.ranges.ranges(2) == [(5, 2), (9, 1)]
    assert (table.block_table, table.slot_mapping) == buffers


def test_clear_leaves_rows_without_slots() -> None:
    audit = SlotAudit()
    table = tagma_table(audit=audit)
    table.add_row([5, 6], 0)
    table.clear()
    table.commit_block_table(1)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    table.compute_slot_mapping(1, starts, torch.tensor([0, 33, 63]))
    assert table.slot_mapping.gpu[:3].tolist() == [-1, -1, -1]
    assert audit.padded == 3
    table.append_row([7], 0)  # as in vLLM, clear() keeps the lengths
    assert table.ranges.ranges(0) == [(0, 2), (7, 1)]


def test_ranges_return_with_the_restored_serving_state() -> None:
    tables = MultiGroupBlockTable(ROWS, TOKENS, False, torch.device("cpu"), [BLOCK_SIZE], [BLOCKS])
    adopt_block_table(tables[0], request_of=nobody, audit=None)
    tables.add_row(([5, 6, 9],), 1)
    runner = object.__new__(TagmaCPUModelRunner)
    runner.input_batch = type("Batch", (), {"block_table": tables})()
    with runner.preserve_serving_state():
        assert tables[0].ranges.ranges(1) == [(0, 3)]
    assert tables[0].ranges.ranges(1) == [(5, 2), (9, 1)]
    assert tables[0].block_table.np[1, :3].tolist() == [5, 6, 9]


def test_cap_refusal_changes_neither_table() -> None:
    table = tagma_table()
    table.add_row(list(range(1, 2 * 256, 2)), 3)
    rows = table.block_table.np.copy()
    with pytest.raises(RangeCapError, match=r"row 3 form 257 ranges.*holds 256"):
        table.append_row([700], 3)
    assert table.num_blocks_per_row[3] == 256
    np.testing.assert_array_equal(table.block_table.np, rows)
    assert table.ranges.num_blocks(3) == 256


def test_debug_switch_names_the_slot_that_differs() -> None:
    table = tagma_table(audit=SlotAudit())
    table.add_row([5, 6], 0)
    table.add_row([9], 1)
    table.block_table.np[1, 0] = 10  # a write behind the table's methods
    table.commit_block_table(2)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    with pytest.raises(InvariantError, match=r"row 1, position 3: slot 291 .* 323 .*\(2 of 3"):
        table.compute_slot_mapping(2, starts, torch.tensor([40, 3, 4]))


def test_debug_switch_sees_an_uncommitted_row() -> None:
    table = tagma_table(audit=SlotAudit())
    table.add_row([5], 0)
    with pytest.raises(InvariantError, match="row 0, position 0"):
        table.compute_slot_mapping(1, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]))


def test_tables_that_cannot_be_adopted() -> None:
    with pytest.raises(UnsupportedError, match="slot mapping of a cache group is 'none'"):
        adopt_block_table(stock_table(mode=SlotMappingMode.NONE), request_of=nobody, audit=None)
    for attribute, option in (
        ("dcp_world_size", "--decode-context-parallel-size is 2"),
        ("pcp_world_size", "--prefill-context-parallel-size is 2"),
    ):
        table = stock_table()
        setattr(table, attribute, 2)
        with pytest.raises(UnsupportedError, match=option):
            adopt_block_table(table, request_of=nobody, audit=None)
        assert type(table) is BlockTable
    with pytest.raises(SeamError, match="TagmaBlockTable"):
        adopt_block_table(tagma_table(), request_of=nobody, audit=None)
