"""The step loop: requests in, ``schedule()``, made-up tokens, ``update_from_output()``.

Everything that the scheduler decides is vLLM's; here is only what the engine around it does. A
request ends when it generated as many tokens as the trace says, by a stop token: vLLM is not told
the length beforehand, as no server is.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Sequence
from time import thread_time_ns
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_tagma.lab.replay.arrivals import Arrivals
from vllm_tagma.lab.replay.hashes import block_hashes
from vllm_tagma.lab.replay.probe import Probe
from vllm_tagma.lab.replay.replay_settings import ONE_ROW, Footprint, Settings
from vllm_tagma.lab.replay.trace import Piece, TraceRequest
from vllm_tagma.lab.replay.views import PoolView

TIMED_EVERY = 16
"""Manager calls are timed in every so many steps; those steps are left out of the step times."""

_TOKEN, _STOP = 0, 1
_GENERATED, _LAST = [_TOKEN], [_STOP]
_NOTHING: list[int] = []
_EMPTY_STEPS_ALLOWED = 3
_ALL = float("inf")


class Hasher:
    """Stands in for vLLM's block hasher: hands out hashes as the request's tokens come."""

    __slots__ = ("_block_size", "_hashes", "_next_tokens")

    def __init__(self, hashes: list[bytes], block_size: int) -> None:
        self._hashes = hashes
        self._block_size = block_size
        self._next_tokens = block_size

    def __call__(self, request: Any) -> Sequence[bytes]:
        tokens = request.num_tokens
        if tokens < self._next_tokens:
            return ()
        full = tokens // self._block_size
        self._next_tokens = (full + 1) * self._block_size
        return self._hashes[len(request.block_hashes) : full]


class Replay:
    """One scheduler driven over one list of requests; run it once."""

    def __init__(
        self,
        scheduler: Any,
        view: PoolView,
        requests: Sequence[TraceRequest],
        settings: Settings,
        *,
        capacity_blocks: int,
        footprint: Footprint = ONE_ROW,
        on_step: Callable[[Replay], None] | None = None,
    ) -> None:
        """``capacity_blocks``: blocks that one request can hold at most; ``footprint`` says how
        many it does. ``on_step`` is called after each step's ``schedule()``, outside of what is
        timed."""
        self.scheduler = scheduler
        self.groups = list(scheduler.kv_cache_config.kv_cache_groups)
        self.view = view
        self.probe = Probe(scheduler.kv_cache_manager, view)
        self.step = 0
        self.clock = 0.0
        self.ended = 0
        self.preemptions = 0
        self.scheduled_tokens = 0
        self.unfit: list[int] = []
        """Requests that the pool can never hold, and that were not sent."""
        self.stuck: list[int] = []
        """Requests that were sent and never admitted; aborted after empty steps."""
        self.running = array("q")
        self.live = array("d")
        self.step_ns = array("q")
        self.admission_steps = array("q")
        self.admitted_tokens = array("q")
        self.hit_tokens = array("q")
        self._requests = requests
        self._settings = settings
        self._capacity = capacity_blocks
        self._footprint = footprint
        self._on_step = on_step
        closed = settings.arrivals == "closed"
        self._room = settings.max_num_seqs if closed else _ALL
        self._arrivals = Arrivals(requests, timed=not closed, speed=settings.speed)
        longest = max(request.prompt_tokens for request in requests)
        self._zeros = [_TOKEN] * longest
        self._ends_at: dict[str, int] = {}
        self._sampling: dict[int, SamplingParams] = {}
        self._empty_steps = 0

    def run(self, progress: Callable[[int], None]) -> None:
        """Replays everything. ``progress`` is told how many requests have ended."""
        # As vLLM's engine core does: what lives through the run is not worth looking at again.
        gc.collect()
        gc.freeze()
        try:
            while self._admit():
                self._one_step()
                if self.step % 64 == 0:
                    progress(self.ended)
        finally:
            gc.unfreeze()
        progress(self.ended)

    # --- arrivals ---------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Sends what has arrived; False when nothing is left."""
        waiting = self.scheduler.requests
        while len(waiting) < self._room:
            index = self._arrivals.due(self.clock)
            if index is None:
                if waiting:
                    return True
                next_time = self._arrivals.next_time()
                if next_time is None:
                    return False
                self.clock = next_time
                continue
            blocks = self._footprint.blocks(self._requests[index], self._settings.block_size)
            if blocks > self._capacity:
                self.unfit.append(index)
                self._end(index)
                continue
            self._send(index)
        return True

    def _send(self, index: int) -> None:
        trace = self._requests[index]
        settings = self._settings
        # Nothing may hit what nothing refers to: the index makes the content unique.
        output = trace.output if trace.output is not None else f"\0{index}"
        hashes = block_hashes(
            (*trace.prompt, Piece(output, trace.output_tokens)), settings.block_size
        )
        name = str(index)
        ends_at = trace.output_tokens
        if trace.abort_after is not None:
            ends_at = trace.abort_after
        self._ends_at[name] = ends_at
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=self._zeros[: trace.prompt_tokens],
                sampling_params=self._sampling_params(trace),
                pooling_params=None,
                arrival_time=self.clock,
                block_hasher=Hasher(hashes, settings.block_size),
            )
        )

    def _sampling_params(self, trace: TraceRequest) -> SamplingParams:
        limit = trace.max_tokens
        if limit is None:
            if self._settings.max_tokens == "known":
                limit = trace.output_tokens
            else:
                # What vLLM's API server fills in when the client sets no limit.
                limit = self.scheduler.max_model_len - trace.prompt_tokens
        params = self._sampling.get(limit)
        if params is None:
            params = self._sampling[limit] = SamplingParams(
                max_tokens=limit, stop_token_ids=[_STOP], detokenize=False
            )
        return params

    def _end(self, index: int) -> None:
        self.ended += 1
        self._arrivals.ended(index, self.clock)

    # --- one step ---------------------------------------------------------------------------------

    def _one_step(self) -> None:
        scheduler, probe = self.scheduler, self.probe
        timing = self.step % TIMED_EVERY == TIMED_EVERY - 1
        probe.step = self.step
        probe.time_calls(timing)
        probe.reading_ns = 0
        begin = thread_time_ns()
        output = scheduler.schedule()
        spent = thread_time_ns() - begin

        self._note_admissions(output)
        self.preemptions += len(output.preempted_req_ids or ())
        self.running.append(len(scheduler.running))
        self.live.append(self.view.live_share())
        if self._on_step is not None:
            self._on_step(self)
        num_tokens = output.total_num_scheduled_tokens
        self.scheduled_tokens += num_tokens
        self.clock += self._settings.step_seconds(num_tokens)
        computed, aborted = self._outputs(output)

        begin = thread_time_ns()
        scheduler.update_from_output(output, computed)
        spent += thread_time_ns() - begin
        if not timing and num_tokens:
            self.step_ns.append(spent - probe.reading_ns)
        if aborted:
            scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        for name in scheduler.finished_req_ids:
            del self._ends_at[name]
            self._end(int(name))
        self._watch_progress(num_tokens)
        self.step += 1

    def _note_admissions(self, output: Any) -> None:
        """Remembers the prefix hits of requests that were admitted in this step."""
        block_size = self._settings.block_size
        for new in output.scheduled_new_reqs:
            name, hit = new.req_id, new.num_computed_tokens
            self.probe.hit_blocks[name] = hit // block_size
            request = self.scheduler.requests[name]
            # Model Runner V2 lists resumed requests here as well.
            if not request.num_preemptions:
                self.admission_steps.append(self.step)
                self.admitted_tokens.append(request.num_prompt_tokens)
                self.hit_tokens.append(hit)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in cached.resumed_req_ids:
                    self.probe.hit_blocks[name] = computed // block_size

    def _outputs(self, output: Any) -> tuple[ModelRunnerOutput, list[str]]:
        """A token for every request whose prompt is computed; and the requests to abort."""
        names = list(output.num_scheduled_tokens)
        requests, ends_at = self.scheduler.requests, self._ends_at
        sampled = []
        aborted = []
        for name in names:
            request = requests[name]
            if request.is_prefill_chunk:
                sampled.append(_NOTHING)
                if not ends_at[name]:
                    aborted.append(name)
                continue
            # vLLM's own list: the public view costs twice as much, a few million times.
            if len(request._output_token_ids) + 1 < ends_at[name]:
                sampled.append(_GENERATED)
            elif self._requests[int(name)].abort_after is None:
                sampled.append(_LAST)
            else:
                sampled.append(_GENERATED)
                aborted.append(name)
        model_output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index=dict(zip(names, range(len(names)), strict=True)),
            sampled_token_ids=sampled,
        )
        return model_output, aborted

    def _watch_progress(self, num_tokens: int) -> None:
        """Gives up the first waiting request if nothing runs for some steps."""
        if num_tokens or not self.scheduler.requests:
            self._empty_steps = 0
            return
        self._empty_steps += 1
        if self._empty_steps < _EMPTY_STEPS_ALLOWED:
            return
        self._empty_steps = 0
        name = next(iter(self.scheduler.requests))
        self.stuck.append(int(name))
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        del self._ends_at[name]
        self._end(int(name))
