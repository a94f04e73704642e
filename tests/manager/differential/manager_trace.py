"""Random scheduler traces: what ``Scheduler.schedule`` and ``update_from_output`` ask of a manager.

A trace is a function of its seed alone. It follows vLLM's scheduler call by call: running requests
first, each preempting the last (or the least urgent) until it fits or has preempted itself; then,
in a step without preemption, waiting requests behind the full-sequence gate and the watermark; then
the outputs, finishes and aborts. The model is replaced by random tokens; nothing else is.

Beyond what one scheduler configuration reaches, a trace may preempt requests that were admitted in
the same step, reserve blocks, and withdraw cached blocks.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from kv_requests import make_request, real_ids_of
from manager_pair import Hit, Pair
from vllm.v1.request import Request, RequestStatus

OPERATIONS = 500
"""Manager calls that a trace makes at least, on either side."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Cache groups of a model: None for full attention, else the number of a window, whose length
    a trace chooses; a number below 0 is a chunk of local attention."""

    windows: tuple[int | None, ...]

    def options(self, seed: int, block_size: int, budget: int) -> dict[str, Any]:
        """What a pair takes for a trace."""
        rng = random.Random(f"layout {seed}")
        lengths = [
            max(2, rng.randint(1, 6) * block_size + rng.choice([-1, 0, 1, 2])) for _ in range(9)
        ]
        chunks = [-block_size * rng.randint(1, 6) for _ in range(9)]
        retention = rng.choice([0, 0, 0, None, 1, 2, 5])
        if not any(window is not None and window >= 0 for window in self.windows):
            retention = rng.choice([0, None])  # vLLM takes no other
        return {
            "windows": tuple(
                w if w is None else lengths[w] if w >= 0 else chunks[w] for w in self.windows
            ),
            "retention": retention and retention * block_size,
            "max_in_flight_tokens": rng.choice([None, budget, 2 * budget, block_size]),
        }


@dataclasses.dataclass
class _InFlight:
    """A scheduled step whose output has not come back yet."""

    scheduled: list[tuple[Request, int, int]]  # request, tokens, preemptions so far


class Trace:
    """One seeded run; :meth:`run` returns the pair for its counters."""

    def __init__(
        self,
        seed: int,
        *,
        mode: str = "exact",
        pair: type[Any] = Pair,
        layout: Layout | None = None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 4, 8, 16])
        tight = rng.random() < 0.65
        usable = rng.randint(3, 24) if tight else rng.randint(25, 220)
        groups = len(layout.windows) if layout else 1
        usable *= groups
        self.max_model_len = max(2 * self.block_size, 4, usable // groups * self.block_size)
        if rng.random() < 0.3:  # a model that is longer, or much shorter, than the pool
            self.max_model_len = max(4, int(self.max_model_len * rng.choice([0.2, 0.5, 1.5])))
        self.by_priority = rng.random() < 0.4
        self.rising = rng.random() < 0.6
        self.asynchronous = rng.random() < 0.4
        self.lookahead = 0 if self.asynchronous else rng.choice([0, 0, 1, 3])
        self.budget = rng.choice([self.block_size, 3 * self.block_size + 1, 64, 10_000])
        self.max_running = rng.choice([2, 6, 40])
        self.gate = rng.random() < 0.7
        self.longest = max(1, int((self.max_model_len - 1) * rng.choice([1.0, 0.5, 0.2])))
        self.session_rate = 0.0 if self.lookahead else rng.choice([0.0, 0.5])
        self.abort_rate = rng.choice([0.0, 0.02, 0.1])
        self.evict_rate = rng.choice([0.0, 0.0, 0.02, 0.2])
        self.late_preempt_rate = rng.choice([0.0, 0.0, 0.05])
        caching, eagle = rng.random() < 0.85, rng.random() < 0.25
        self.pair = pair(
            num_blocks=usable + 1,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            enable_caching=caching,
            use_eagle=eagle and layout is None,
            watermark=rng.choice([0.0, 0.0, 0.05, 0.3]),
            events=rng.random() < 0.8,
            metrics=rng.random() < 0.5,
            mode=mode,
            **(layout.options(seed, self.block_size, self.budget) if layout else {}),
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: list[_InFlight] = []
        self.past: list[Request] = []  # finished: material for second turns
        self.documents = [
            [rng.randrange(1000) for _ in range(self.max_model_len)]
            for _ in range(rng.randint(1, 4))
        ]
        self.created = 0

    def run(self, operations: int = OPERATIONS) -> Pair:
        pair = self.pair
        while pair.calls.total() < operations:
            self._arrive()
            self._schedule()
            if len(self.in_flight) > (1 if self.asynchronous else 0):
                self._update(self.in_flight.pop(0))
            self._abort()
            self._maintain()
            pair.end_step()
        self._drain()
        return pair

    # --- requests ---------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.rng
        if len(self.waiting) > 6:
            return
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            longest = self.longest
            kind = rng.random()
            if kind < 0.3 and self.past:  # second turn of a chat
                tokens = list(rng.choice(self.past).all_token_ids)
            elif kind < 0.8:  # a shared document, cut somewhere
                tokens = rng.choice(self.documents)[: rng.randint(1, longest)]
            else:
                tokens = []
            tokens = tokens + [
                rng.randrange(1000) for _ in range(rng.randint(0, 3 * self.block_size))
            ]
            tokens = tokens[: rng.randint(1, longest)] if rng.random() < 0.3 else tokens[:longest]
            images: tuple[tuple[str, int, int], ...] = ()
            if rng.random() < 0.15 and len(tokens) > 4:
                offset = rng.randrange(len(tokens) - 2)
                length = rng.randint(1, len(tokens) - offset)
                images = ((rng.choice(["cat", "dog"]), offset, length),)
            self.created += 1
            request = make_request(
                f"r{self.created}",
                tokens or [7],
                block_size=self.block_size,
                max_tokens=rng.choice([1, 2, 8, 40, 40, 1_000_000]),
                lora=rng.choice([None, None, None, "red", "blue"]),
                salt=rng.choice([None, None, None, "red", "s1"]),
                images=images,
                priority=self._priority(),
                arrival=float(self.created),
                skip_reading=True if rng.random() < 0.1 else None,
                report_mode=rng.choice([None, None, None, None, "full"])
                if self.rng.random() < 0.3
                else None,
                session_id=rng.choice([None, "session"]),
            )
            self.waiting.append(request)
            if self.by_priority:
                self.waiting.sort()

    def _priority(self) -> int:
        if not self.by_priority:
            return 0
        if self.rising:  # the urgent come late: they preempt what was scheduled before them
            return 9 - self.created % 10
        return self.rng.randint(0, 2)

    # --- one step ---------------------------------------------------------------------------------

    def _schedule(self) -> None:
        self.pair.new_step_starts()
        self.preempted: list[Request] = []
        self.scheduled: dict[str, tuple[Request, int]] = {}
        budget = self._schedule_running(self.budget)
        if not self.preempted:
            self._schedule_waiting(budget)
        if self.running and self.rng.random() < self.late_preempt_rate:
            self._preempt(self.rng.choice(self.running))
        self.pair.end_scheduling([request for request, _ in self.scheduled.values()])
        for request, tokens in self.scheduled.values():
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            request.spec_token_ids = []
            request.is_prefill_chunk = request.num_computed_tokens < (
                request.num_tokens + request.num_output_placeholders
            )
            if self.asynchronous and not request.is_prefill_chunk:
                request.num_output_placeholders += 1
        self.in_flight.append(
            _InFlight([(r, n, r.num_preemptions) for r, n in self.scheduled.values()])
        )

    def _schedule_running(self, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = min(
                request.num_tokens_with_spec
                + request.num_output_placeholders
                - request.num_computed_tokens,
                budget,
                self.max_model_len - request.num_computed_tokens - 1,
            )
            if tokens <= 0:
                index += 1
                continue
            while (
                self.pair.allocate_slots(request, tokens, num_lookahead_tokens=self.lookahead)
                is None
            ):
                victim = (
                    max(self.running, key=lambda r: (r.priority, r.arrival_time))
                    if self.by_priority
                    else self.running[-1]
                )
                position = self.running.index(victim)
                if victim.request_id in self.scheduled:
                    budget += self.scheduled[victim.request_id][1]
                if position < index:
                    index -= 1
                self._preempt(victim)
                if victim is request:
                    return 0
            self.scheduled[request.request_id] = (request, tokens)
            budget -= tokens
            index += 1
        return budget

    def _schedule_waiting(self, budget: int) -> None:
        rng, pair = self.rng, self.pair
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            session = request.num_computed_tokens > 0  # it kept its blocks
            hit = pair.no_hit() if session else pair.get_computed_blocks(request)
            if not session:
                request.shared_prefix_boundary = hit.boundary
            if rng.random() < 0.05:  # not admitted for a reason of the scheduler's
                break
            computed = request.num_computed_tokens + hit.num_tokens
            tokens = min(request.num_tokens - computed, budget)
            admitted = pair.allocate_slots(
                request,
                tokens,
                hit,
                num_lookahead_tokens=self.lookahead,
                full_sequence_must_fit=self.gate,
                reserved_blocks=rng.choice([0, 0, 0, 0, 2]),
                has_scheduled_reqs=bool(self.running),
            )
            if admitted is None:
                break
            if not session:
                pair.record_prefix_cache_stats(request, hit.num_tokens)
            self.waiting.pop(0)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = computed
            self.scheduled[request.request_id] = (request, tokens)
            budget -= tokens

    def _preempt(self, request: Request) -> None:
        self.pair.preempt(request)
        self.running.remove(request)
        self.scheduled.pop(request.request_id, None)
        self.preempted.append(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = 0
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        request.spec_token_ids = []
        self.waiting.insert(0, request)
        if self.by_priority:
            self.waiting.sort()

    # --- outputs ----------------------------------------------------------------------------------

    def _update(self, step: _InFlight) -> None:
        rng, pair = self.rng, self.pair
        for request, tokens, preemptions in step.scheduled:
            if request.is_finished() or request.num_preemptions != preemptions:
                continue
            request.num_in_flight_tokens -= tokens
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            drafts = max(computed - request.num_tokens, 0)
            if computed < request.num_tokens:
                continue  # a prompt that came in part
            accepted = rng.randint(0, drafts) if drafts and not self.asynchronous else 0
            if not self.asynchronous:
                request.num_computed_tokens -= drafts - accepted
            known = request.num_tokens
            for _ in range(1 + accepted):
                request.append_output_token_ids(rng.randrange(1000))
                if self._is_done(request):
                    break
            if accepted:
                self._accept_drafts(request, known, min(known + accepted, request.num_tokens))
            if self.asynchronous:
                request.num_output_placeholders -= 1
                pair.cache_blocks(
                    request, request.num_computed_tokens - request.num_output_placeholders
                )
            pair.estimate_cached_tokens(request)
            if self._is_done(request):
                if request in self.running and rng.random() < self.session_rate:
                    self._continue_session(request)
                else:
                    self._finish(request)
            elif self.lookahead:
                request.spec_token_ids = [0] * rng.randint(0, self.lookahead)

    def _accept_drafts(self, request: Request, first: int, end: int) -> None:
        """Tokens [first, end) were drafts and are confirmed: what was written for them is right."""

    def _is_done(self, request: Request) -> bool:
        return (
            request.num_tokens >= self.max_model_len
            or request.num_output_tokens >= request.max_tokens
        )

    def _continue_session(self, request: Request) -> None:
        """A streaming session's next input, as ``Scheduler._update_request_as_session`` applies it:
        the last sampled token goes, the rest becomes prompt, the blocks stay."""
        computed = request.num_computed_tokens - request.num_output_placeholders
        if computed + 2 >= self.max_model_len or request.num_in_flight_tokens:
            self._finish(request)
            return
        self.pair.tally["session"] += 1
        more = [self.rng.randrange(1000) for _ in range(self.rng.randint(1, self.block_size + 1))]
        del request._all_token_ids[computed:]
        del request.block_hashes[computed // self.block_size :]
        request._output_token_ids.clear()
        request._all_token_ids.extend(more[: self.max_model_len - 1 - computed])
        request.prompt_token_ids[:] = request._all_token_ids
        request.update_block_hashes()
        request.num_prompt_tokens = len(request.prompt_token_ids)
        request.num_computed_tokens = computed
        request.status = RequestStatus.WAITING
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.pair.free(request)
        self.past.append(request)
        del self.past[:-8]

    def _abort(self) -> None:
        for request in [*self.running, *self.waiting]:
            if self.rng.random() < self.abort_rate:
                self._finish(request)

    # --- between steps ----------------------------------------------------------------------------

    def _maintain(self) -> None:
        rng = self.rng
        if rng.random() < 0.03:
            self.pair.reset_prefix_cache()
        if rng.random() < self.evict_rate and self.past and self.pair.caching:
            probe = rng.choice(self.past)
            hit = self.pair.get_computed_blocks(probe)
            self._evict(hit)
        if rng.random() < self.evict_rate and self.running and self.pair.caching:
            name = rng.choice(self.running).request_id
            self._evict(self.pair.row_of(name))

    def _evict(self, blocks: Hit) -> None:
        chosen = [i for i in range(len(real_ids_of(blocks.tagma))) if self.rng.random() < 0.3]
        self.pair.evict_blocks(blocks, chosen)

    def _drain(self) -> None:
        """Everything ends, in any order: nothing may be left."""
        rest = [*self.running, *self.waiting]
        self.rng.shuffle(rest)
        for request in rest:
            self._finish(request)
        assert self.pair.tagma.usage == 0.0
        assert self.pair.num_free() == self.pair.num_blocks - 1
        self.pair.end_step()
        assert self.pair.reset_prefix_cache()
        self.pair.end_step()


def run_manager_trace(
    seed: int, mode: str, layout: Layout | None = None, *, operations: int = OPERATIONS
) -> dict[str, int]:
    """Runs one trace; returns how often each call was made, and what came of it."""
    pair = Trace(seed, mode=mode, layout=layout).run(operations)
    return {**pair.calls, **pair.tally}
