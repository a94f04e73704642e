"""Scheduler traces with a KV connector: two of vLLM's schedulers, each before a peer of its own.

The peer is the environment: a connector that another server could stand behind. By its seed it
offers tokens that a step loads itself, or tokens that arrive steps later, or none yet; it keeps
finished requests while they are fetched; it reports blocks that failed to load, and reports
transfers of requests that were aborted meanwhile. Both peers answer alike to the same questions.

On our side a worker's memory takes part. A transfer uses the block ids that were told when it began
and no others: what arrives is written there, first garbage, then the content; what is sent is read
there after each step until it is done. A pinned block that was moved, evicted or handed out shows
as foreign KV on one side or the other.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from typing import Any

import numpy as np
from kv_worker import KvWorker, Step
from scheduler_trace import SchedulerTrace, Side
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

GARBAGE = -7


@dataclasses.dataclass
class Transfer:
    """Blocks of a request under way. ``blocks`` are the ids told when it began, ``first`` is the
    position in the request of the first of them."""

    request: Request
    blocks: list[int]
    first: int  # token
    end: int  # token
    steps: int  # that it takes from now on
    failed: frozenset[int] = frozenset()  # which of ``blocks``, by index
    expected: np.ndarray | None = None  # content, for what is sent

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def failed_ids(self) -> set[int]:
        return {self.blocks[i] for i in self.failed}


class Peer(KVConnectorBase_V1):
    """A scheduler-side connector whose answers are a function of the seed."""

    def __init__(self, config: Any, cache: Any, *, seed: int, block_size: int) -> None:
        super().__init__(config, KVConnectorRole.SCHEDULER, cache)
        self.seed = seed
        self.block_size = block_size
        rng = random.Random(f"{seed} peer")
        self.offer_rate = rng.choice([0.3, 0.7, 0.9])
        self.sync_share = rng.choice([0.0, 0.3, 1.0])
        self.fail_rate = rng.choice([0.0, 0.1, 0.4])
        self.sync_fails = True
        self.send_rate = rng.choice([0.0, 0.3, 0.8])
        self.longest = rng.choice([1, 4, 20])
        self.asked: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.started: list[Transfer] = []  # since the last step was scheduled
        self.loads: list[Transfer] = []  # the same, within the step
        self.receiving: list[Transfer] = []
        self.sending: list[Transfer] = []
        self.offers: dict[str, tuple[int, int, bool]] = {}
        self.counts: Counter[str] = Counter()
        self.memory: KvWorker | None = None

    def _rng(self, request: Request, *more: object) -> random.Random:
        return random.Random(f"{self.seed} {request.request_id} {request.num_preemptions} {more}")

    # --- scheduler side ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        key = f"{request.request_id} {request.num_preemptions}"
        self.asked[key] += 1
        rng = self._rng(request, "offer")
        self.offers.pop(request.request_id, None)
        if rng.random() > self.offer_rate or request.skip_reading_prefix_cache:
            return 0, False
        # Once, or vLLM would load for ever: it asks again for a prompt of one token, whose last
        # token it takes back to compute, and for one of which nothing could be loaded.
        if self.taken[key] > (request.num_prompt_tokens == 1):
            return 0, False
        if self.asked[key] <= rng.choice([0, 0, 0, 2]):
            return None, False
        in_step = rng.random() < self.sync_share
        upto = rng.choice([request.num_prompt_tokens, rng.randint(1, request.num_prompt_tokens)])
        if in_step:  # whole blocks, and a token is left to compute
            upto = min(upto, request.num_tokens - 1) // self.block_size * self.block_size
        if upto <= num_computed_tokens:
            return 0, False
        self.offers[request.request_id] = (num_computed_tokens, upto, in_step)
        return upto - num_computed_tokens, not in_step

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        first, end, in_step = self.offers.pop(request.request_id)
        self.taken[f"{request.request_id} {request.num_preemptions}"] += 1
        assert end - first == num_external_tokens
        (ids,) = blocks.get_block_ids()
        ids = ids[first // self.block_size : -(-end // self.block_size)]
        (views,) = blocks.blocks
        assert [view.block_id for view in views] == blocks.get_block_ids()[0]
        assert not any(view.is_null for view in views)
        if not in_step:  # nothing is published of what has not arrived
            assert blocks.get_unhashed_block_ids() == ids
            assert blocks.get_unhashed_block_ids_all_groups() == [ids]
            assert sum(view.block_hash is not None for view in views) * self.block_size == first
        rng = self._rng(request, "load")
        failed = frozenset[int]()
        if rng.random() < self.fail_rate and (self.sync_fails or not in_step):
            failed = frozenset(i for i in range(len(ids)) if rng.random() < 0.3)
        steps = rng.randint(1, self.longest)
        transfer = Transfer(request, ids, first, end, steps, failed)
        (self.loads if in_step else self.started).append(transfer)
        self.counts["loads" if in_step else "receives"] += 1
        self.counts["failed"] += bool(failed)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        for name in scheduler_output.num_scheduled_tokens:
            assert len(state.resolve_block_ids(name)) == 1
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        rng = self._rng(request, "send")
        ended = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        if not ended or not block_ids or rng.random() > self.send_rate:
            return False, None
        end = min(request.num_tokens - 1, request.num_computed_tokens)
        transfer = Transfer(request, list(block_ids), 0, end, rng.randint(1, self.longest))
        if self.memory is not None:
            transfer.expected = self.memory.canaries(request, end)
        self.sending.append(transfer)
        self.counts["sends"] += 1
        return True, None

    # --- worker side ------------------------------------------------------------------------------

    def step_of_worker(self, started: list[Transfer], loads: list[Transfer]) -> KVConnectorOutput:
        """What a worker reports behind a step in which these transfers began."""
        self.receiving += started
        output = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        for load in loads:
            output.invalid_block_ids |= load.failed_ids
        for transfers, done in (
            (self.receiving, output.finished_recving),
            (self.sending, output.finished_sending),
        ):
            for transfer in list(transfers):
                transfer.steps -= 1
                if transfer.steps < 0:
                    assert done is not None
                    done.add(transfer.name)
                    transfers.remove(transfer)
                    if transfers is self.receiving:
                        self._arrive(transfer)
                        output.invalid_block_ids |= transfer.failed_ids
                elif self.memory is not None and transfers is self.sending:
                    self.memory.check_sent(transfer)
        return output

    def _arrive(self, transfer: Transfer) -> None:
        if self.memory is not None:
            self.memory.receive(transfer)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class TransferWorker(KvWorker):
    """A worker's memory that transfers write to and read from, by the ids that they were told.

    vLLM publishes what a step is to load before it is loaded, and leaves it published when the load
    fails and is computed again: a third request may read it meanwhile. From the first such load on
    garbage is accepted, foreign KV never.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.load_failed = False

    def _token_slots(self, transfer: Transfer) -> np.ndarray:
        offset = transfer.first // self.block_size
        position = np.arange(transfer.first, transfer.end)
        blocks = np.array(transfer.blocks, dtype=np.int64)
        return (
            blocks[position // self.block_size - offset] * self.block_size
            + position % self.block_size
        )

    def _wrong(self, held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        wrong = held != wanted
        return np.flatnonzero(wrong & (held != GARBAGE) if self.load_failed else wrong)

    def begin(self, transfer: Transfer) -> None:
        """A transfer may write in any order from now on."""
        self.memory.reshape(-1)[self._token_slots(transfer)] = GARBAGE

    def receive(self, transfer: Transfer) -> None:
        """All has arrived, but in the blocks that failed."""
        content = self.canaries(transfer.request, transfer.end)[transfer.first :]
        self.memory.reshape(-1)[self._token_slots(transfer)] = content
        for block in transfer.failed_ids:
            self.memory[block] = GARBAGE

    def check_sent(self, transfer: Transfer) -> None:
        assert transfer.expected is not None
        held = self.memory.reshape(-1)[self._token_slots(transfer)]
        wrong = self._wrong(held, transfer.expected)
        assert not len(wrong), (
            f"{transfer.name} sends foreign KV at positions {wrong[:5]} of {transfer.end}, in "
            f"blocks {transfer.blocks} of {self.block_size}"
        )
        self.reads += len(held)

    def execute_with(self, step: Step, started: list[Transfer], loads: list[Transfer]) -> None:
        """A step in which transfers begin: behind its copies, loads before its tokens."""
        self._copy(step.copies)
        for transfer in started:
            self.begin(transfer)
        for load in loads:
            self.receive(load)
            self.load_failed |= bool(load.failed)
        self.execute(dataclasses.replace(step, copies=[]))


class ConnectorSide(Side):
    """A scheduler and its peer."""

    peer: Peer
    started: deque[tuple[list[Transfer], list[Transfer]]]

    def step(self, seed: int) -> dict[str, Any]:
        decided = super().step(seed)
        self.started.append((self.peer.started, self.peer.loads))
        self.peer.started, self.peer.loads = [], []
        return decided

    def process(self) -> list[Any]:
        started, loads = self.started.popleft()
        worker, self.worker = self.worker, None
        if worker is not None:
            assert isinstance(worker, TransferWorker)
            worker.execute_with(self.unexecuted[0], started, loads)
        self.steps[0][1].kv_connector_output = self.peer.step_of_worker(started, loads)
        try:
            return super().process()
        finally:
            self.worker = worker


class ConnectorTrace(SchedulerTrace):
    """One seeded run with a peer on each side."""

    _side = ConnectorSide
    _worker = TransferWorker

    def __init__(self, seed: int, **options: Any) -> None:
        rng = random.Random(f"{seed} transfer")
        self.role = rng.choice(["kv_both", "kv_both", "kv_producer", "kv_consumer"])
        self.policy = rng.choice(["recompute", "recompute", "fail"])
        self.transfer = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role=self.role,
            kv_load_failure_policy=self.policy,
        )
        self.mode = options.get("mode", "exact")
        super().__init__(seed, **options)
        for side in (self.tagma, self.stock):
            scheduler = side.scheduler
            side.peer = scheduler.connector = Peer(
                scheduler.vllm_config,
                scheduler.kv_cache_config,
                seed=seed,
                block_size=self.block_size,
            )
            # In vLLM a failed load ends badly while a later step is in flight, with either manager.
            side.peer.sync_fails = not self.asynchronous
            side.started = deque()
        self.tagma.peer.memory = self.tagma.worker
        self._count_calls(self.tagma.scheduler.kv_cache_manager)
        if self.mode.startswith("live"):
            self._relocate_in_steps(self.tagma.scheduler.kv_cache_manager)

    def _count_calls(self, manager: Any) -> None:
        """Operations: what the scheduler asks of our manager that changes or looks up blocks."""
        for name in ("allocate_slots", "get_computed_blocks", "cache_blocks", "free", "get_blocks"):
            call = getattr(manager, name)

            def counted(*args: Any, call: Any = call, **kwargs: Any) -> Any:
                self.counts["operations"] = self.counts.get("operations", 0) + 1
                return call(*args, **kwargs)

            setattr(manager, name, counted)

    def _relocate_in_steps(self, manager: Any) -> None:
        """Moves parts of rows about in each step, far more than compaction does."""
        begin, rng = manager.new_step_starts, random.Random(self.seed)

        def begin_and_move() -> None:
            begin()
            for row in manager._rows.values():
                first = rng.randrange(row.held_blocks)
                last = rng.randint(first + 1, row.held_blocks)
                manager.pool.relocate(row.handle, first, last)

        manager.new_step_starts = begin_and_move

    def run(self, steps: int = 90) -> dict[str, int]:
        counts = Counter(super().run(steps))
        counts.update(self.tagma.peer.counts)
        if len(self.sides) == 2:
            assert self.tagma.peer.counts == self.stock.peer.counts
        return dict(counts)

    def _compare(self) -> None:
        super()._compare()
        stats = self.tagma.scheduler.kv_cache_manager.pool.stats()
        self.counts["pinned"] = self.counts.get("pinned", 0) + stats["pinned_blocks"]

    def _take_events(self, side: Any) -> Any:
        events = side.publisher.take()
        # What a failed load withdraws is a set of ids, which differ: its order is nobody's.
        return Counter(map(repr, events)) if self.policy == "fail" else events

    def _reset(self, side: Any, running_too: bool) -> Any:
        try:
            return side.scheduler.reset_prefix_cache(reset_running_requests=running_too)
        except RuntimeError as error:  # requests wait for transfers: vLLM's own limit
            return str(error)

    def _busy(self) -> bool:
        return super()._busy() or bool(self.tagma.scheduler.requests)
