"""Scheduler traces with sessions, whose input arrives in parts while steps are in flight.

When a turn of a session ends, vLLM drops what is in flight for it and goes back to the last token
whose KV is certain. The blocks stay with the session, which waits for its next input or has it
already; what the steps in flight still write there is written again later.
"""

from __future__ import annotations

from typing import Any

from kv_requests import make_request
from scheduler_trace import SchedulerTrace
from vllm.v1.request import Request, RequestStatus


class SessionTrace(SchedulerTrace):
    """Half of the requests are sessions of up to four turns."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self._sessions: set[str] = set()
        self._turns_left: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self.counts["turns"] = 0

    def _add(self, name: str, tokens: list[int], options: dict[str, Any]) -> None:
        session = self.rng.random() < 0.5
        if session:
            self._sessions.add(name)
            self._turns_left[name] = self.rng.randint(1, 4)
        for side in self.sides:
            request = make_request(name, tokens, **options)
            request.resumable = session
            side.scheduler.add_request(request)

    def _step(self) -> None:
        super()._step()
        self._follow()

    def _disturb(self) -> None:
        super()._disturb()
        requests = self.tagma.scheduler.requests
        for name in [name for name in self._turns_left if name in requests]:
            if requests[name].streaming_queue:
                continue  # so that the length of what is to come is known
            waits = requests[name].status == RequestStatus.WAITING_FOR_STREAMING_REQ
            # Input may come early; a session that waits keeps its blocks from all others.
            if self.rng.random() < (0.5 if waits else 0.03):
                self._send(name, requests[name])

    @staticmethod
    def _reset(scheduler: Any, running_too: bool) -> object:
        """vLLM cannot take their blocks from sessions that wait for input, and says so."""
        try:
            return scheduler.reset_prefix_cache(reset_running_requests=running_too)
        except RuntimeError as error:
            return str(error)

    def _drain(self) -> None:
        """Sessions are aborted: those whose next input waits for blocks can wait for each other."""
        for side in self.sides:
            side.scheduler.finish_requests(self._sessions, RequestStatus.FINISHED_ABORTED)
        super()._drain()

    def _send(self, name: str, session: Request) -> None:
        """The next input, or that there is none."""
        left = self._turns_left[name]
        self._turns_left[name] = left - 1
        tokens = [self.rng.randrange(3, 256) for _ in range(self.rng.randint(1, 12))]
        room = self.max_model_len - session.num_tokens - session.max_tokens
        if left <= 0 or room <= len(tokens):
            del self._turns_left[name]
            left = 0
        for side in self.sides:
            request = make_request(
                name, tokens, block_size=self.block_size, max_tokens=session.max_tokens
            )
            request.resumable = left > 0
            side.scheduler.add_request(request)
        self.counts["turns"] += left > 0
        self._follow()

    def _follow(self) -> None:
        """Lets the worker's model of each session follow the input that it was given."""
        for name, request in self.tagma.scheduler.requests.items():
            before = self._prompts.setdefault(name, request.num_prompt_tokens)
            if before != request.num_prompt_tokens:
                self._prompts[name] = request.num_prompt_tokens
                self.tagma.worker.forget(request, request.num_computed_tokens)
