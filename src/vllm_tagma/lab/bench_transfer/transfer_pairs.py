"""The blocks that transfers pair: one trace, replayed on a prefill pool and on a decode pool.

Both are vLLM's scheduler with one of the two managers and no model, as in ``tagma replay``. On the
prefill side a request ends with its first token; on the decode side it runs as long as the trace
says, and its whole prompt gets blocks in one step, as for a prompt that is pulled. What the decoder
has in its prefix cache is not transferred.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_tagma.config import Backend
from vllm_tagma.lab.replay.drive import Replay
from vllm_tagma.lab.replay.replay_engine import build_scheduler
from vllm_tagma.lab.replay.replay_settings import Settings
from vllm_tagma.lab.replay.trace import TraceRequest
from vllm_tagma.lab.replay.views import view_of
from vllm_tagma.transfer.joint_runs import Ids

Progress = Callable[[int], None]

_WHOLE_PROMPTS = 1 << 24
"""Tokens in a step of the decode side: more than any set of prompts that arrives at once."""


class PairedBlocks(NamedTuple):
    """One request's transfer: ``local[i]`` on the decode side is read from ``remote[i]``."""

    request: int
    local: Ids
    remote: Ids
    fresh: bool
    """Nothing had been evicted from the decode pool yet."""


class Pools(NamedTuple):
    """What two pools of one backend gave."""

    pairs: list[PairedBlocks]
    live: float
    """Mean share of the decode pool that running requests held."""
    preemptions: int


def pair_blocks(
    backend: Backend,
    requests: Sequence[TraceRequest],
    settings: Settings,
    *,
    num_blocks: int,
    progress: Progress = lambda ended: None,
) -> Pools:
    """Replays ``requests`` on both sides; pools of ``num_blocks`` each.

    A request that one side never held is left out, and so is one of which the decoder had all.
    """
    sent = _Rows(backend, _prefills(requests), settings, num_blocks=num_blocks)
    sent.at_end(progress)
    decode = dataclasses.replace(settings, max_num_batched_tokens=_WHOLE_PROMPTS)
    received = _Rows(backend, requests, decode, num_blocks=num_blocks)
    received.at_admission(lambda ended: progress(len(requests) + ended))
    pairs = []
    for index, (row, hit, fresh) in sorted(received.rows.items()):
        prompt = -(-requests[index].prompt_tokens // settings.block_size)
        remote, local = sent.rows.get(index), row[hit:prompt]
        if remote is not None and len(local):
            pairs.append(PairedBlocks(index, local, remote[0][hit:prompt], fresh))
    live = np.asarray(received.replay.live)
    return Pools(pairs, float(live.mean()), received.replay.preemptions)


def _prefills(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    return [
        dataclasses.replace(request, output_tokens=1, max_tokens=None, abort_after=None)
        for request in requests
    ]


class _Rows:
    """A replay that notes each request's row once: block ids, hit, whether the pool is fresh."""

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[TraceRequest],
        settings: Settings,
        *,
        num_blocks: int,
    ) -> None:
        longest = max(request.prompt_tokens + request.output_tokens for request in requests)
        scheduler = build_scheduler(
            backend, settings, num_blocks=num_blocks, max_model_len=longest + 1
        )
        self._manager = scheduler.kv_cache_manager
        self._view = view_of(self._manager)
        self.rows: dict[int, tuple[Ids, int, bool]] = {}
        self.replay = Replay(
            scheduler,
            self._view,
            requests,
            settings,
            capacity_blocks=num_blocks - 1,
            on_step=self._after_step,
        )
        self._admissions = False

    def at_end(self, progress: Progress) -> None:
        """Run, and note rows when their requests end."""
        free = self._manager.free

        def noting(request: Any) -> None:
            if request.is_finished():
                self._note(request.request_id)
            free(request)

        self._manager.free = noting
        self.replay.run(progress)

    def at_admission(self, progress: Progress) -> None:
        """Run, and note rows in the step that gives them their blocks."""
        self._admissions = True
        self.replay.run(progress)

    def _after_step(self, replay: Replay) -> None:
        if self._admissions:
            for request in replay.scheduler.running:
                if int(request.request_id) not in self.rows:
                    self._note(request.request_id)

    def _note(self, name: str) -> None:
        hit = self.replay.probe.hit_blocks.get(name)
        if hit is not None:  # else it was never admitted
            row = np.array(self._view.row_ids(name), dtype=np.int64)
            self.rows[int(name)] = (row, hit, not self._view.evicted())
