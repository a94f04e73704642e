"""A manager trace whose steps a worker executes, in turn or one step late (``kv_worker.py``)."""

from __future__ import annotations

from typing import Any

from kv_worker import KvWorker, Scheduled, Step
from manager_trace import Trace
from vllm.v1.request import Request


class CanaryTrace(Trace):
    """``overlapped``: a step executes only after the next one was scheduled, as on a GPU."""

    def __init__(self, seed: int, *, overlapped: bool, **options: Any) -> None:
        super().__init__(seed, **options)
        self.asynchronous = overlapped
        if overlapped:
            self.lookahead = 0
        # vLLM preempts while it schedules running requests, before it admits any that could have
        # hit what the victim was to write.
        self.late_preempt_rate = 0.0
        self.worker = KvWorker(
            num_blocks=self.pair.num_blocks,
            block_size=self.block_size,
            windows=self.pair.windows,
        )
        self.unexecuted: list[Step] = []

    @property
    def reads(self) -> int:
        return self.worker.reads

    def _schedule(self) -> None:
        super()._schedule()
        scheduled = [
            Scheduled(
                request, request.num_computed_tokens - tokens, request.num_computed_tokens, before
            )
            for request, tokens, before in self.in_flight[-1].scheduled
        ]
        self.unexecuted.append(self.pair.log.step(self.pair.copies, self.pair.updates, scheduled))
        while len(self.unexecuted) > (1 if self.asynchronous else 0):
            self.worker.execute(self.unexecuted.pop(0))

    def _accept_drafts(self, request: Request, first: int, end: int) -> None:
        self.worker.rewrite(request, first, end)

    def _continue_session(self, request: Request) -> None:
        super()._continue_session(request)
        self.worker.forget(request, request.num_computed_tokens)
