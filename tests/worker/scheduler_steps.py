"""vLLM's scheduler on our manager, and workers that must know each row as it does.

Requests and sessions (requests that are continued with more input when they have answered) come,
are aborted, come again under the same name, and meet resets of the cache, on pools that are too
small for them. Each output is sent by pickle, as to a worker process.
"""

from __future__ import annotations

import collections
import pickle
import random
from collections import deque
from typing import Any, Protocol

from built_schedulers import build_scheduler
from kv_requests import block_hasher, ids_of
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_tagma.integration.scheduler import TagmaAsyncScheduler, TagmaScheduler

ROWS, MAX_BLOCKS, EOS = 6, 64, 2


class Worker(Protocol):
    """A model runner as far as it keeps rows."""

    def execute(self, output: SchedulerOutput) -> None:
        """What a step does to the rows."""

    def rows(self) -> dict[str, list[int]]:
        """Of each request that it knows, the block ids; all that it keeps of them must agree."""

    def scheduled(self) -> set[str]:
        """The requests whose rows are in the batch."""


class SchedulerSteps:
    """One seeded run of a scheduler for Model Runner V2, or V1, over ``worker``."""

    def __init__(self, seed: int, config: Any, worker: Worker, *, v2: bool, mode: str) -> None:
        self.rng = rng = random.Random(seed)
        self.worker = worker
        self.v2 = v2
        self.block_size = rng.choice([4, 8])
        self.overlapped = rng.random() < 0.5
        self.scheduler = build_scheduler(
            TagmaAsyncScheduler if self.overlapped else TagmaScheduler,
            config,
            num_blocks=1 + rng.randint(12, 40),
            block_size=self.block_size,
            caching=rng.random() < 0.9,
            mode=mode,
            max_num_seqs=rng.choice([3, ROWS]),
            max_num_batched_tokens=rng.choice([16, 48, 256]),
            policy=rng.choice(["fcfs", "priority"]),
            async_scheduling=self.overlapped,
        )
        self.scheduler.use_v2_model_runner = v2
        self.max_tokens = self.scheduler.max_model_len
        self.text = [rng.randrange(3, 256) for _ in range(self.max_tokens)]
        self.steps: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.open_sessions: set[str] = set()
        self.counts: collections.Counter[str] = collections.Counter()

    def run(self, steps: int) -> collections.Counter[str]:
        for number in range(steps):
            self._arrive(number)
            self._step()
            self._disturb()
        for name in list(self.scheduler.requests):
            self._abort(name)
        self._step()
        assert self.scheduler.kv_cache_manager.usage == 0.0
        assert self.worker.rows() == {}
        return self.counts

    def _step(self) -> None:
        output = self.scheduler.schedule()
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        self.counts["moved"] += len(output.kv_cache_block_copies or ())
        self.counts["empty"] += not output.num_scheduled_tokens
        self.worker.execute(pickle.loads(pickle.dumps(output)))
        self._compare(output)
        names = list(output.num_scheduled_tokens)
        sampled = [
            [] if self.scheduler.requests[name].is_prefill_chunk else [self._token()]
            for name in names
        ]
        places = {name: i for i, name in enumerate(names)}
        result = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
        self.steps.append((output, result))
        while len(self.steps) > (1 if self.overlapped and names else 0):
            self.scheduler.update_from_output(*self.steps.popleft())

    def _token(self) -> int:
        return EOS if self.rng.random() < 0.15 else self.rng.randrange(3, 256)

    def _compare(self, output: SchedulerOutput) -> None:
        manager = self.scheduler.kv_cache_manager
        manager.check_invariants()
        rows = self.worker.rows()
        assert self.worker.scheduled() >= set(output.num_scheduled_tokens)
        for name in manager._rows:
            known = name in rows
            assert known or name not in output.num_scheduled_tokens
            if known:
                assert rows[name] == ids_of(manager.get_blocks(name)), name
                self.counts["idle"] += name not in output.num_scheduled_tokens
        assert set(manager._rows) <= set(rows), "every holder of blocks has been scheduled"

    # --- what happens to requests ---------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        rng = self.rng
        if len(self.scheduler.requests) < 2 * ROWS and rng.random() < 0.6:
            self._add(f"r{number}", resumable=rng.random() < 0.4)
        for name in list(self.open_sessions):
            if name not in self.scheduler.requests:
                self.open_sessions.discard(name)
            elif rng.random() < 0.2:
                session = self.scheduler.requests[name]
                queued = len(session.streaming_queue or ())
                more = self.max_tokens - session.num_tokens - session.max_tokens - 40 * queued
                ends = more < 20 or rng.random() < 0.2
                self._add(name, resumable=not ends, most=max(more, 1))
                self.counts["continued"] += not ends
                if ends:
                    self.open_sessions.discard(name)

    def _add(self, name: str, *, resumable: bool, most: int = 1 << 20) -> None:
        rng = self.rng
        start = 0 if rng.random() < 0.5 else rng.randrange(self.max_tokens)
        length = min(rng.randint(1, self.max_tokens // 2), most, 20 if resumable else 1 << 20)
        sampling = SamplingParams(max_tokens=rng.choice([1, 4, 20]))
        sampling.update_from_generation_config({}, eos_token_id=EOS)
        request = Request(
            request_id=name,
            prompt_token_ids=(self.text[start:] + self.text)[:length],
            sampling_params=sampling,
            pooling_params=None,
            priority=rng.randint(0, 2),
            arrival_time=float(self.scheduler.current_step),
            block_hasher=block_hasher(self.block_size),
            resumable=resumable,
        )
        if resumable:
            self.open_sessions.add(name)
        self.scheduler.add_request(request)

    def _disturb(self) -> None:
        rng = self.rng
        for name in list(self.scheduler.requests):
            if rng.random() < 0.04:
                self._abort(name)
                # Before the next step: it ends and comes in the same one. Not while an output is
                # under way, which vLLM would give to the new request.
                flying = any(name in output.num_scheduled_tokens for output, _ in self.steps)
                if not flying and rng.random() < 0.5:
                    self._add(name, resumable=False)
                    self.counts["again"] += 1
        if rng.random() < 0.04:
            waiting = any(
                request.status is not RequestStatus.RUNNING
                and request.request_id in self.scheduler.kv_cache_manager._rows
                for request in self.scheduler.requests.values()
            )
            self.scheduler.reset_prefix_cache(reset_running_requests=not waiting)
            self.counts["resets"] += 1

    def _abort(self, name: str) -> None:
        self.open_sessions.discard(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
