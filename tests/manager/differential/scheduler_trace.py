"""Two of vLLM's schedulers, one on each manager, fed the same requests and the same model outputs.

Where ``manager_trace`` imitates the scheduler, here it is vLLM's own: admission, preemption,
chunked prefill and the asynchronous pipeline. Compared after each step: what is scheduled,
preempted and finished, the tokens that came from the cache, the statistics, the KV events. The ids
that our scheduler sends are added up as the worker does and must give the manager's rows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

from built_schedulers import StockAsyncScheduler, StockScheduler, build_scheduler
from kv_requests import (
    make_request,
)
from kv_worker import KvWorker, Scheduled, Step, by_row, row_key
from manager_trace import Layout
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_tagma.integration.row_updates import row_updates_of
from vllm_tagma.integration.scheduler import TagmaAsyncScheduler, TagmaScheduler
from vllm_tagma.manager import TagmaKVCacheManager

STEPS = 90


class _Publisher:
    """Stands where vLLM's ZMQ publisher would; keeps the batches."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def take(self) -> list[Any]:
        events, self.events = self.events, []
        return events


def _nulls(groups: Iterable[list[int]]) -> list[list[bool]]:
    """Which of the blocks sent are null, in each group."""
    return [[block == 0 for block in ids] for ids in groups]


class Side:
    """One scheduler, its pipeline of unprocessed steps, and the rows its worker would hold."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.sends_updates = isinstance(scheduler, (TagmaScheduler, TagmaAsyncScheduler))
        scheduler.kv_event_publisher = self.publisher = _Publisher()
        self.steps: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.worker_rows: dict[str, list[int]] = {}  # once all steps so far are executed
        self.worker: KvWorker | None = None  # and the memory that it would write
        self.unexecuted: deque[Step] = deque()
        self.rows_moved = 0
        self.accepted = self.rejected = 0  # drafts

    def step(self, seed: int) -> dict[str, Any]:
        """Schedules; returns what the other side must have decided, too."""
        output = self.scheduler.schedule()
        self._apply_to_worker(output)
        sampled = [
            []
            if self.scheduler.requests[name].is_prefill_chunk
            else self._sample(
                seed, name, drafts=len(output.scheduled_spec_decode_tokens.get(name, ()))
            )
            for name in output.num_scheduled_tokens
        ]
        names = list(output.num_scheduled_tokens)
        self.steps.append(
            (
                output,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: i for i, name in enumerate(names)},
                    sampled_token_ids=sampled,
                ),
            )
        )
        cached = output.scheduled_cached_reqs
        return {
            "tokens": output.num_scheduled_tokens,
            "preempted": output.preempted_req_ids,
            "finished": output.finished_req_ids,
            "new": [
                (new.req_id, new.num_computed_tokens, _nulls(new.block_ids))
                for new in output.scheduled_new_reqs
            ],
            "cached": list(
                zip(
                    cached.req_ids,
                    cached.num_computed_tokens,
                    [ids and _nulls(ids) for ids in cached.new_block_ids],
                    strict=True,
                )
            ),
            "resumed": cached.resumed_req_ids,
        }

    def process(self) -> list[Any]:
        """Takes the oldest step's output in; returns what clients and loggers get to see."""
        seen = []
        step = self.unexecuted.popleft()
        for part in step.scheduled:
            if self.scheduler.num_spec_tokens:  # else nothing can have been rejected
                self._place(part)
        if self.worker is not None:
            self.worker.execute(step)
        output, results = self.steps.popleft()
        known = {
            part.request.request_id: (part.request.num_tokens, self._accepted(part, results))
            for part in step.scheduled
        }
        updated = self.scheduler.update_from_output(output, results)
        self._take_drafts(step, output, results, known)
        for client, outputs in updated.items():
            stats = outputs.scheduler_stats
            seen.append(
                (
                    client,
                    [
                        (
                            out.request_id,
                            out.new_token_ids,
                            out.finish_reason,
                            out.prefill_stats and out.prefill_stats.num_cached_tokens,
                            out.prefill_stats and out.prefill_stats.num_local_cached_tokens,
                        )
                        for out in outputs.outputs
                    ],
                    stats
                    and (
                        stats.num_running_reqs,
                        stats.num_waiting_reqs,
                        stats.kv_cache_usage,
                        stats.prefix_cache_stats,
                    ),
                )
            )
        return seen

    def _sample(self, seed: int, name: str, *, drafts: int = 0) -> list[int]:
        """As many of the drafts as are accepted, and the token behind them."""
        request = self.scheduler.requests[name]
        position = request.num_output_tokens + len(self.steps)
        draw = random.Random(f"{seed} {name} {position} {request.num_preemptions}")
        token = draw.randrange(3, 256)
        accepted = draw.randint(0, drafts) if drafts else 0
        return [token] + [draw.randrange(3, 256) for _ in range(accepted)]

    @staticmethod
    def _place(part: Scheduled) -> None:
        """Where the worker computes, once it knows which drafts of the steps before were rejected;
        the scheduler had counted them as computed."""
        request = part.request
        if request.num_preemptions == part.preemptions:  # of ended requests as well: they are read
            tokens = part.end - part.start
            part.start = request.num_computed_tokens - request.num_in_flight_tokens
            part.end = part.start + tokens

    @staticmethod
    def _accepted(part: Scheduled, results: ModelRunnerOutput) -> int:
        """Drafts that the step confirmed; vLLM shortens the list when a request stops."""
        index = results.req_id_to_index[part.request.request_id]
        return max(len(results.sampled_token_ids[index]) - 1, 0)

    def _take_drafts(
        self,
        step: Step,
        output: SchedulerOutput,
        results: ModelRunnerOutput,
        known: dict[str, tuple[int, int]],
    ) -> None:
        """Confirmed drafts are in memory under tokens that were not known; then come new drafts,
        which the asynchronous scheduler takes for granted."""
        scheduler = self.scheduler
        new: dict[str, list[int]] = {}
        for part in step.scheduled:
            request, name = part.request, part.request.request_id
            if request.num_preemptions != part.preemptions:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            sampled = results.sampled_token_ids[results.req_id_to_index[name]]
            if drafts:
                tokens, accepted = known[name]
                confirmed = min(accepted, request.num_tokens - tokens)
                self.accepted += confirmed
                self.rejected += drafts - confirmed
                if self.worker is not None and confirmed:
                    self.worker.rewrite(request, tokens, tokens + confirmed)
            if sampled and name in scheduler.requests:
                most = scheduler.num_spec_tokens
                new[name] = [1] * (request.num_tokens % (most + 1))
        if scheduler.num_spec_tokens and not isinstance(scheduler, AsyncScheduler):
            scheduler.update_draft_token_ids(DraftTokenIds(list(new), list(new.values())))

    def _apply_to_worker(self, output: SchedulerOutput) -> None:
        step = self._received(output)
        self.unexecuted.append(step)
        self.rows_moved += step.apply_to(self.worker_rows)
        for name in self.worker_rows.keys() & self.scheduler.requests.keys():
            rows = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, row in enumerate(rows):
                held = self.worker_rows[row_key(name, group)]
                assert len(held) == len(row)
                # Nobody tells a worker of a running request what fell out of a window.
                assert all(now in (was, 0) for was, now in zip(held, row, strict=True))

    def _received(self, output: SchedulerOutput) -> Step:
        cached = output.scheduled_cached_reqs
        sent = {
            name: ids
            for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if ids is not None
        }
        whole = {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
        whole |= {name: ids for name, ids in sent.items() if name in cached.resumed_req_ids}
        scheduled = []
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens  # counted already
            scheduled.append(Scheduled(request, end - tokens, end, request.num_preemptions))
        return Step(
            copies=list(output.kv_cache_block_copies or ()),
            updates=list(row_updates_of(output)) if self.sends_updates else None,
            gone=output.finished_req_ids | (output.preempted_req_ids or set()),
            whole=by_row(whole),
            more={
                key: ids
                for key, ids in by_row({n: i for n, i in sent.items() if n not in whole}).items()
                if ids
            },
            scheduled=scheduled,
        )


class SchedulerTrace:
    """One seeded run of both schedulers, or of ours ``alone``, in a mode that may evict otherwise
    than stock does. With ``depth`` both are asynchronous, and so many steps are scheduled before
    the oldest of them is executed."""

    transfer: KVTransferConfig | None = None
    _side: type[Side] = Side
    _worker: type[KvWorker] = KvWorker

    def __init__(
        self,
        seed: int,
        *,
        stock_config: VllmConfig,
        tagma_config: VllmConfig,
        mode: str = "exact",
        alone: bool = False,
        depth: int = 0,
        layout: Layout | None = None,
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([4, 4, 8, 16, 32])
        num_blocks = 1 + (rng.randint(8, 40) if rng.random() < 0.7 else rng.randint(60, 300))
        groups = layout.options(seed, self.block_size, 0) if layout else {"windows": (None,)}
        groups.pop("max_in_flight_tokens", None)  # the schedulers know it
        num_blocks = 1 + (num_blocks - 1) * len(groups["windows"])
        chunked = rng.random() < 0.7
        self.settings = {
            "max_num_seqs": rng.choice([3, 8, 64]),
            "max_num_batched_tokens": rng.choice([16, 48, 256]) if chunked else 256,
            "enable_chunked_prefill": chunked,
            "long_prefill_token_threshold": rng.choice([0, 0, 24]) if chunked else 0,
            "policy": rng.choice(["fcfs", "priority", "priority"]),
            "watermark": rng.choice([0.0, 0.0, 0.1]),
            "scheduler_reserve_full_isl": rng.random() < 0.6,
            "async_scheduling": rng.random() < 0.5 or depth > 0,
        }
        self.asynchronous = self.settings["async_scheduling"]
        self.depth = depth or (1 if self.asynchronous else 0)
        self.rising = rng.random() < 0.6
        self.caching = rng.random() < 0.9
        classes = (
            (StockAsyncScheduler, TagmaAsyncScheduler)
            if self.asynchronous
            else (StockScheduler, TagmaScheduler)
        )
        self.stock, self.tagma = (
            self._side(
                build_scheduler(
                    kind,
                    config,
                    num_blocks=num_blocks,
                    block_size=self.block_size,
                    caching=self.caching,
                    mode=mode,
                    transfer=self.transfer,
                    groups=groups,
                    **self.settings,
                )
            )
            for kind, config in zip(classes, (stock_config, tagma_config), strict=True)
        )
        self.sides = [self.tagma] if alone else [self.tagma, self.stock]
        self.tagma.worker = self._worker(
            num_blocks=num_blocks, block_size=self.block_size, windows=groups["windows"]
        )
        self.max_model_len = self.tagma.scheduler.max_model_len
        assert type(self.stock.scheduler.kv_cache_manager) is KVCacheManager
        assert type(self.tagma.scheduler.kv_cache_manager) is TagmaKVCacheManager
        self.documents = [
            [rng.randrange(3, 256) for _ in range(self.max_model_len)] for _ in range(3)
        ]
        self.texts: list[list[int]] = []  # prompts and outputs seen so far: second turns
        self.created = 0
        self.decided: dict[str, Any] = {}  # what the last step scheduled
        self.hash_lookahead = getattr(stock_config, "num_hash_lookahead_tokens", 0)
        if not self.caching:
            self.hash_lookahead = 0
        self.counts = {"preempted": 0, "cached_tokens": 0, "finished": 0, "resets": 0}

    def run(self, steps: int = STEPS) -> dict[str, int]:
        for _ in range(steps):
            self._arrive()
            self._step()
            self._disturb()
        self._drain()
        self.counts["withdrawn"] = self.stock.scheduler.withdrawn
        self.counts["copies"] = self.tagma.worker.copied
        self.counts["rows_moved"] = self.tagma.rows_moved
        self.counts["reads"] = self.tagma.worker.reads
        self.counts["dropped"] = self.tagma.worker.dropped
        self.counts["accepted"] = self.tagma.accepted
        self.counts["rejected"] = self.tagma.rejected
        return self.counts

    def _step(self) -> None:
        self.decided = self._same(side.step(self.seed) for side in self.sides)
        self.counts["preempted"] += len(self.decided["preempted"] or ())
        depth = self.depth if self.decided["tokens"] else 0
        while len(self.tagma.steps) > depth:
            seen = self._same(side.process() for side in self.sides)
            for _, outputs, _ in seen:
                self.counts["finished"] += sum(out[2] is not None for out in outputs)
                self.counts["cached_tokens"] += sum(out[3] or 0 for out in outputs)
        self._same(self._take_events(side) for side in self.sides)
        self._compare()

    @staticmethod
    def _same(of_sides: Iterable[Any]) -> Any:
        """What our side did, which stock must have done, too."""
        ours, *stock = of_sides
        for theirs in stock:
            assert ours == theirs
        return ours

    def _compare(self) -> None:
        schedulers = [side.scheduler for side in self.sides]
        self._same(s.kv_cache_manager.block_pool.get_num_free_blocks() for s in schedulers)
        self._same([r.request_id for r in s.running] for s in schedulers)
        self._same({n: list(r.all_token_ids) for n, r in s.requests.items()} for s in schedulers)
        self.tagma.scheduler.kv_cache_manager.check_invariants()

    def _arrive(self) -> None:
        rng = self.rng
        if len(self.tagma.scheduler.waiting) > 12:
            return
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            kind = rng.random()
            if kind < 0.3 and self.texts:
                tokens = rng.choice(self.texts)
            elif kind < 0.8:
                tokens = rng.choice(self.documents)[: rng.randint(1, self.max_model_len - 1)]
            else:
                tokens = []
            tokens = tokens + [rng.randrange(3, 256) for _ in range(rng.randint(1, 20))]
            tokens = tokens[: self.max_model_len - 1]
            self.created += 1
            options: dict[str, Any] = {
                "block_size": self.block_size,
                "max_tokens": rng.choice([1, 5, 20, 60]),
                "salt": rng.choice([None, None, "s"]),
                "priority": self._priority(),
                "arrival": float(self.created),
                "skip_reading": True if rng.random() < 0.1 else None,
                "report_mode": "full" if rng.random() < 0.1 else None,
                "hash_lookahead": self.hash_lookahead,
            }
            self._add(f"r{self.created}", tokens, options)

    def _add(self, name: str, tokens: list[int], options: dict[str, Any]) -> None:
        for side in self.sides:
            side.scheduler.add_request(make_request(name, tokens, **options))

    def _priority(self) -> int:
        if self.settings["policy"] != "priority":
            return 0
        if self.rising:  # the urgent come late: they preempt what was scheduled before them
            return 9 - self.created % 10
        return self.rng.randint(0, 2)

    def _disturb(self) -> None:
        rng = self.rng
        requests = self.tagma.scheduler.requests
        for name in list(requests):
            if rng.random() < 0.01:
                self._keep(name)
                for side in self.sides:
                    side.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            elif rng.random() < 0.05:
                self._keep(name)
        if rng.random() < 0.02:
            self.counts["resets"] += 1
            running_too = rng.random() < 0.5
            self._same(self._reset(side.scheduler, running_too) for side in self.sides)
        self._compare()

    @staticmethod
    def _reset(scheduler: Any, running_too: bool) -> object:
        return scheduler.reset_prefix_cache(reset_running_requests=running_too)

    def _keep(self, name: str) -> None:
        self.texts.append(list(self.tagma.scheduler.requests[name].all_token_ids))
        del self.texts[:-10]

    def _take_events(self, side: Side) -> Any:
        return side.publisher.take()

    def _busy(self) -> bool:
        return self.tagma.scheduler.has_unfinished_requests() or bool(self.tagma.steps)

    def _drain(self) -> None:
        steps = 0
        while self._busy():
            self._step()
            steps += 1
            assert steps < 20_000, "requests wait, nothing runs: the engine hangs"
        assert self.tagma.scheduler.kv_cache_manager.usage == 0.0
        assert self.tagma.scheduler.reset_prefix_cache()
