"""The manager's contract with KV connectors, driven by hand: what is pinned, published, given back.

Whole schedulers with a connector are compared with stock in ``differential/connector_trace.py``.
"""

from __future__ import annotations

import collections
import logging
from typing import Any

import pytest
from built_schedulers import build_scheduler
from connector_trace import ConnectorTrace
from kv_requests import admit, decode, ids_of, make_manager, make_request, make_stock, row_of
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import get_block_hash

from vllm_tagma.config import TagmaConfig
from vllm_tagma.errors import InvariantError, UnsupportedError
from vllm_tagma.integration.scheduler import TagmaAsyncScheduler, TagmaScheduler
from vllm_tagma.transfer_contract import TransferContract

BLOCK = 4
TOKENS = list(range(1_000, 1_400))
LIVE = TagmaConfig(compaction="live", copy_budget=1_000)


def ask(name: str, tokens: int) -> Any:
    return make_request(name, TOKENS[:tokens], block_size=BLOCK)


def manager_of(num_blocks: int = 17) -> Any:
    manager = make_manager(num_blocks=num_blocks, block_size=BLOCK, tagma_config=LIVE, slack=0.0)
    manager.connected = True
    return manager


def receive(manager: Any, request: Any, tokens: int) -> Any:
    """Admits a request whose next ``tokens`` tokens will arrive, as the scheduler does."""
    hit, local, _, diverged = manager.get_computed_blocks_for_connector(request)
    assert not diverged
    new = manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=local,
        new_computed_blocks=hit,
        num_external_computed_tokens=tokens,
        delay_cache_blocks=True,
        full_sequence_must_fit=True,
    )
    if new is not None:
        request.status = request.status.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = local + tokens
    return new


def arrive(manager: Any, request: Any) -> None:
    manager.cache_blocks(request, request.num_computed_tokens)
    request.status = request.status.WAITING


def run(manager: Any, request: Any) -> Any:
    new = manager.allocate_slots(
        request,
        request.num_tokens - request.num_computed_tokens,
        new_computed_blocks=manager.empty_kv_cache_blocks,
        full_sequence_must_fit=True,
    )
    request.status = request.status.RUNNING
    request.num_computed_tokens = request.num_tokens
    return new


def pins(manager: Any) -> tuple[int, int]:
    stats = manager.pool.stats()
    return stats["pins"], stats["pinned_blocks"]


def moves(manager: Any, request: Any) -> bool:
    """Whether the first block of a request can be moved now."""
    manager.take_new_block_ids()
    manager.new_step_starts()
    handle = manager._rows[request.request_id].handle
    return bool(manager.pool.relocate(handle, 0, 1))


@pytest.mark.parametrize("build", [make_stock, make_manager])
def test_what_has_not_arrived_is_published_later(build: Any) -> None:
    manager = build(num_blocks=17, block_size=BLOCK)
    first, second = ask("first", 18), ask("second", 18)
    receive(manager, first, 16)
    assert len(row_of(manager, first)) == 4
    assert manager.get_computed_blocks(second)[1] == 0
    arrive(manager, first)
    assert manager.get_computed_blocks(second)[1] == 16
    assert len(ids_of(run(manager, first))) == 1
    assert manager.block_pool.get_num_free_blocks() == 11


def test_a_local_hit_is_part_of_the_row_and_not_received() -> None:
    manager = manager_of()
    first = ask("first", 9)
    admit(manager, first)
    manager.free(first)
    second = ask("second", 18)
    receive(manager, second, 8)
    blocks = manager.get_blocks("second")
    row = row_of(manager, second)
    assert len(row) == 4
    assert blocks.get_unhashed_block_ids() == row[2:]
    assert [view.block_hash for view in blocks.blocks[0]] == [*second.block_hashes[:2], None, None]


def test_a_row_stays_while_it_is_received_and_moves_again_when_it_runs() -> None:
    manager = manager_of()
    request = ask("r", 10)
    manager.new_step_starts()
    receive(manager, request, 10)
    assert pins(manager) == (1, 3)
    assert not moves(manager, request)
    arrive(manager, request)
    assert not moves(manager, request)
    request.num_computed_tokens -= 1
    run(manager, request)
    assert pins(manager) == (0, 0)
    assert moves(manager, request)
    manager.check_invariants()


def test_the_worker_hears_of_a_received_row_when_the_request_runs() -> None:
    manager = manager_of()
    request = ask("r", 10)
    manager.new_step_starts()
    receive(manager, request, 8)
    assert manager.take_row_updates(()) == []
    arrive(manager, request)
    manager.new_step_starts()
    run(manager, request)
    (update,) = manager.take_row_updates({"r"})
    assert (update.request_id, update.first_block) == ("r", 0)
    assert update.ranges.ids() == row_of(manager, request)


@pytest.mark.parametrize("when", ["received", "arrived", "sent"])
def test_whoever_ends_a_request_drops_its_pin(when: str) -> None:
    manager = manager_of()
    request = ask("r", 10)
    if when == "sent":
        admit(manager, request)
        manager.pin_for_sending("r")
        manager.pin_for_sending("r")  # in place of the first
    else:
        receive(manager, request, 10)
    if when == "arrived":
        arrive(manager, request)
    assert pins(manager) == (1, 3)
    manager.free(request)
    assert pins(manager) == (0, 0)
    assert manager.usage == 0.0
    manager.check_invariants()
    manager.pin_for_sending("r")  # unknown by now
    assert pins(manager) == (0, 0)


def test_a_row_that_is_sent_stays_until_it_is_freed() -> None:
    manager = manager_of()
    request = ask("r", 10)
    admit(manager, request)
    assert moves(manager, request)
    manager.pin_for_sending("r")
    assert not moves(manager, request)


def test_nothing_is_pinned_when_a_prompt_does_not_fit() -> None:
    manager = manager_of(num_blocks=4)
    assert receive(manager, ask("r", 16), 12) is None
    assert pins(manager) == (0, 0)
    assert manager.block_pool.get_num_free_blocks() == 3


def test_blocks_that_leave_late_are_taken_until_they_are_given_back() -> None:
    results = []
    for manager in (make_stock(num_blocks=9, block_size=BLOCK), manager_of(num_blocks=9)):
        request, other = ask("r", 10), make_request("o", [7] * 26, block_size=BLOCK)
        admit(manager, request)
        leaving = manager.pop_blocks_for_free(request)
        assert leaving
        assert row_of(manager, request) == []
        seen = [manager.block_pool.get_num_free_blocks(), manager.reset_prefix_cache()]
        manager.block_pool.free_blocks(reversed(leaving))
        seen += [manager.block_pool.get_num_free_blocks(), manager.usage]
        # Tail first: when seven of eight are wanted, the head of the prefix is what is left.
        admit(manager, other)
        seen.append(manager.get_computed_blocks(ask("again", 10))[1])
        manager.free(other)
        seen += [manager.pop_blocks_for_free(request), manager.reset_prefix_cache()]
        results.append(seen)
    assert results[0] == results[1]
    assert results[0][:3] == [5, False, 8]
    assert results[0][4] == BLOCK


def test_what_a_leaving_request_published_in_this_step_is_withdrawn() -> None:
    manager = manager_of()
    request = ask("r", 10)
    manager.new_step_starts()
    admit(manager, request)
    leaving = manager.pop_blocks_for_free(request)
    assert manager.get_computed_blocks(ask("again", 10))[1] == 0
    manager.check_invariants()
    manager.block_pool.free_blocks(reversed(leaving))
    manager.check_invariants()
    assert manager.usage == 0.0


def test_what_a_request_lacks_is_counted_as_in_vllm() -> None:
    counted = []
    for manager in (make_stock(num_blocks=17, block_size=BLOCK), manager_of()):
        request = ask("r", 10)
        admit(manager, request)
        counted.append(
            [
                manager.coordinator.get_num_blocks_to_allocate(
                    request_id=name,
                    num_tokens=tokens,
                    new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
                    num_encoder_tokens=0,
                    total_computed_tokens=10,
                    num_local_computed_tokens=10,
                    num_tokens_main_model=tokens,
                    apply_admission_cap=True,
                    prefill_end=10,
                )
                for name, tokens in (("r", 10), ("r", 13), ("r", 3), ("unknown", 5))
            ]
        )
    assert counted[0] == counted[1] == [0, 1, 0, 2]
    hit, _, _ = manager.get_computed_blocks(ask("again", 10))
    with pytest.raises(UnsupportedError, match="request again lacks beside a prefix hit"):
        manager.coordinator.get_num_blocks_to_allocate(
            request_id="again", num_tokens=10, new_computed_blocks=hit.blocks
        )


def test_blocks_look_to_a_connector_as_those_of_vllm() -> None:
    seen = []
    for manager in (make_stock(num_blocks=17, block_size=BLOCK), manager_of()):
        request = ask("r", 10)
        admit(manager, request)
        decode(manager, request, 7)
        blocks = manager.get_blocks("r")
        (ids,) = blocks.get_block_ids()
        (views,) = blocks.blocks
        assert [view.block_id for view in views] == ids
        assert blocks.get_unhashed_block_ids() == ids[2:]
        assert blocks.get_unhashed_block_ids_all_groups() == [ids[2:]]
        assert blocks.get_block_ids(group_ids=[0]) == (ids,)
        assert blocks.new_empty().get_block_ids() == ([],)
        assert blocks.new_empty().get_block_ids(allow_none=True) is None
        assert manager.get_block_ids_for_computed_tokens("r", 5) == (ids[:2],)
        assert manager.get_block_ids_for_computed_tokens("r", 500) == (ids,)
        cut = manager.truncate_computed_blocks(manager.get_computed_blocks(ask("a", 10))[0], BLOCK)
        assert ids_of(cut) == ids[:1]
        assert manager.finalize_partial_tail_offloads(request) == []
        manager.remove_skipped_blocks("r", 8, 10)
        hashes = [view.block_hash for view in views]
        if not isinstance(manager, TransferContract):  # stock appends the number of the group
            hashes = [found and get_block_hash(found) for found in hashes]
        seen.append([hashes, [view.is_null for view in views], len(ids_of(blocks))])
    assert seen[0] == seen[1]


def test_a_pin_that_belongs_to_no_transfer_breaks_a_law() -> None:
    manager = manager_of()
    admit(manager, ask("r", 10))
    manager.pool.pin(manager._rows["r"].handle, 0, 1)
    with pytest.raises(InvariantError, match=r"law M3 .*: 1 pins are held for 0 transfers"):
        manager.check_invariants()


@pytest.mark.parametrize(
    ("kind", "overlapped", "expected"),
    [(TagmaScheduler, False, "live"), (TagmaAsyncScheduler, True, "idle")],
)
def test_rows_move_beside_a_connector_only_where_steps_do_not_overlap(
    kind: Any, overlapped: bool, expected: str, engine_configs: Any
) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.tagma.scheduler")
    logger.addHandler(handler)
    try:
        for transfer in (
            None,
            KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        ):
            scheduler = build_scheduler(
                kind,
                engine_configs["tagma_config"],
                num_blocks=17,
                block_size=BLOCK,
                mode="live/100/0.0",
                transfer=transfer,
                async_scheduling=overlapped,
            )
            manager, request = scheduler.kv_cache_manager, ask("r", 10)
            assert manager.connected == (transfer is not None)
            admit(manager, request)
            assert moves(manager, request) == (expected == "live" or transfer is None)
    finally:
        logger.removeHandler(handler)
    assert sum("is idle instead of live" in line for line in lines) == (expected == "idle")


@pytest.mark.parametrize("lost", ["nothing", "receiving", "sending"])
def test_a_transfer_without_its_pin_is_noticed(
    lost: str, engine_configs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traces fail when rows under transfer may move, so that a pass means something."""
    pin, unpin = TransferContract._pin, TransferContract._unpin

    def pin_others(self: Any, row: Any, hold: Any) -> None:
        pin(self, row, hold)
        if hold == lost:
            self.pool.unpin(*row.pins)
            row.pins = (-1,)

    def unpin_others(self: Any, row: Any) -> None:
        if row.pins == (-1,):
            row.pins, row.hold = (), ""
        unpin(self, row)

    monkeypatch.setattr(TransferContract, "_pin", pin_others)
    monkeypatch.setattr(TransferContract, "_unpin", unpin_others)
    monkeypatch.setattr(TransferContract, "_num_pins", lambda self: self.pool.stats()["pins"])
    totals: collections.Counter[str] = collections.Counter()

    def trace() -> None:
        for seed in range(200, 209):
            totals.update(
                ConnectorTrace(seed, mode="live/65536/0.0", alone=True, **engine_configs).run()
            )

    if lost == "nothing":
        trace()
        assert totals["sends"] > 50
        assert totals["receives"] > 20
    else:
        with pytest.raises(AssertionError, match=r"foreign KV|not held by the worker"):
            trace()
