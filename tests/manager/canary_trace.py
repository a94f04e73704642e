"""A trace whose "device" is an array: what is written through slots must be there when it is read.

Each token of each request has a canary that names all it depends on: the tokens before it, salt,
adapter, images. A step writes the canaries of its tokens through the request's row, in the order of
the batch, then every scheduled request reads its whole context. Shared blocks pass only if they
hold what both expect; a hit on a block that was never written, or a block with two owners, does
not.
"""

from __future__ import annotations

import numpy as np
from kv_requests import row_of
from manager_trace import Trace
from vllm.v1.request import Request


class CanaryTrace(Trace):
    """``overlapped``: a step executes only after the next one was scheduled, as on a GPU."""

    def __init__(self, seed: int, *, overlapped: bool) -> None:
        super().__init__(seed)
        self.asynchronous = overlapped
        self.lookahead = 0  # drafts are written and overwritten; their canaries would need a model
        self.session_rate = 0.0
        self.device = np.zeros(self.pair.num_blocks * self.block_size, dtype=np.int64)
        self.unexecuted: list[list[tuple[Request, int, int, int, np.ndarray]]] = []
        self.reads = 0
        self._chains: dict[str, list[int]] = {}

    def _schedule(self) -> None:
        super()._schedule()
        step = []
        for request, tokens, preemptions in self.in_flight[-1].scheduled:
            end = request.num_computed_tokens
            row = np.array(row_of(self.pair.tagma, request))
            position = np.arange(end)
            slots = row[position // self.block_size] * self.block_size + position % self.block_size
            step.append((request, preemptions, end - tokens, end, slots))
        self.unexecuted.append(step)
        while len(self.unexecuted) > (1 if self.asynchronous else 0):
            self._execute(self.unexecuted.pop(0))

    def _execute(self, step: list[tuple[Request, int, int, int, np.ndarray]]) -> None:
        for request, _, start, end, slots in step:  # also of what was preempted meanwhile
            self.device[slots[start:end]] = self._canaries(request, end)[start:end]
        for request, preemptions, _, end, slots in step:
            if request.num_preemptions == preemptions:
                wrong = np.flatnonzero(self.device[slots] != self._canaries(request, end))
                assert not len(wrong), f"{request.request_id} reads foreign KV at {wrong[:5]}"
                self.reads += end

    def _canaries(self, request: Request, end: int) -> np.ndarray:
        chain = self._chains.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        for position in range(len(chain), min(end, len(tokens))):
            images = tuple(
                (image.identifier, position - image.mm_position.offset)
                for image in request.mm_features
                if 0 <= position - image.mm_position.offset < image.mm_position.length
            )
            lora = request.lora_request.name if request.lora_request else None
            before = chain[-1] if chain else hash((request.cache_salt, lora))
            chain.append(hash((before, tokens[position], images)))
        # A request that ended or was preempted while a step was in flight: that token never came.
        return np.array(chain[:end] + [-1] * (end - len(chain)), dtype=np.int64)
