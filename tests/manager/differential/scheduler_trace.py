"""Two of vLLM's schedulers, one on each manager, fed the same requests and the same model outputs.

Where ``manager_trace`` imitates the scheduler, here it is vLLM's own: admission, preemption,
chunked prefill and the asynchronous pipeline. Compared after each step: what is scheduled,
preempted and finished, the tokens that came from the cache, the statistics, the KV events. The ids
that our scheduler sends are added up as the worker does and must give the manager's rows.

``_StockMixin`` applies to stock what ours does about vLLM #57580, as ``manager_pair`` explains.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kv_requests import cache_config, ids_of, make_request, mode_of, slack_is
from kv_worker import KvWorker, Scheduled, Step
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_tagma.integration.row_updates import row_updates_of
from vllm_tagma.integration.scheduler import TagmaAsyncScheduler, TagmaScheduler
from vllm_tagma.manager import TagmaKVCacheManager

STEPS = 90
DRAFTS = 3
_LIMITS = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 64}
_LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 1024,
"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false}"""


def engine_config(folder: Path, backend: str, *, speculation: str = "") -> VllmConfig:
    """A configuration as ``vllm serve --kv-cache-backend`` makes it, of a model that is never
    loaded. ``speculation``: a method; draft models and heads are never loaded either."""
    (folder / "config.json").write_text(_LLAMA)
    drafts: dict[str, Any] = {}
    if speculation:
        source = {"prompt_lookup_max": 3} if speculation == "ngram" else {"model": str(folder)}
        drafts = {"method": speculation, "num_speculative_tokens": DRAFTS, **source}
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        block_size=32,
        additional_config={"kv_cache_backend": backend},
        **({"speculative_config": drafts} if drafts else {}),
        **_LIMITS,
    ).create_engine_config()


class _StockMixin:
    """Withdraws what a request published in the step that preempts it (vLLM #57580)."""

    _published_before: dict[str, int] | None = None
    withdrawn = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        self._published_before = dict(manager.num_cached_block)
        output = super().schedule(*args, **kwargs)
        self._published_before = None
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._published_before is not None:
            row = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
            for block in row[self._published_before.get(request.request_id, 0) :]:
                if block.block_hash is not None:
                    self.withdrawn += 1
                    self.kv_cache_manager.evict_blocks({block.block_id})
        super()._preempt_request(request, *args, **kwargs)


class _StockScheduler(_StockMixin, Scheduler):
    pass


class _StockAsyncScheduler(_StockMixin, AsyncScheduler):
    pass


class _Publisher:
    """Stands where vLLM's ZMQ publisher would; keeps the batches."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def take(self) -> list[Any]:
        events, self.events = self.events, []
        return events


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
                (new.req_id, new.num_computed_tokens, len(new.block_ids[0]))
                for new in output.scheduled_new_reqs
            ],
            "cached": list(
                zip(
                    cached.req_ids,
                    cached.num_computed_tokens,
                    [len(ids[0]) if ids else None for ids in cached.new_block_ids],
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
        for name in self.worker_rows:
            row = ids_of(self.scheduler.kv_cache_manager.get_blocks(name))
            assert self.worker_rows[name] == row

    def _received(self, output: SchedulerOutput) -> Step:
        cached = output.scheduled_cached_reqs
        sent = {
            name: ids[0]
            for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if ids is not None
        }
        whole = {new.req_id: new.block_ids[0] for new in output.scheduled_new_reqs}
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
            whole=whole,
            more={name: ids for name, ids in sent.items() if name not in whole},
            scheduled=scheduled,
        )


def build_scheduler(
    kind: type[Any],
    config: VllmConfig,
    *,
    num_blocks: int,
    block_size: int,
    caching: bool = True,
    mode: str = "default",
    transfer: KVTransferConfig | None = None,
    **settings: Any,
) -> Any:
    """A scheduler on a pool of that size. ``settings`` are fields of vLLM's scheduler config; the
    model is as long as the pool, or 256 tokens. ``mode`` is for our scheduler, see ``mode_of``."""
    config = copy.copy(config)
    config.kv_transfer_config = transfer
    options, slack = mode_of(mode)
    if issubclass(kind, (TagmaScheduler, TagmaAsyncScheduler)):
        tagma = {"compaction": options.compaction, "copy_budget": options.copy_budget}
        config.additional_config = {**config.additional_config, "tagma": tagma}
    config.scheduler_config = copy.copy(config.scheduler_config)
    for name, value in settings.items():
        assert hasattr(config.scheduler_config, name)
        setattr(config.scheduler_config, name, value)
    config.scheduler_config.max_num_scheduled_tokens = None
    if transfer is not None:  # as vLLM sets it for most connectors
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = min(_LIMITS["max_model_len"], (num_blocks - 1) * block_size)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.enable_prefix_caching = caching
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with slack_is(slack):
        return kind(
            config,
            cache_config(num_blocks=num_blocks, block_size=block_size),
            StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
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
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([4, 4, 8, 16, 32])
        num_blocks = 1 + (rng.randint(8, 40) if rng.random() < 0.7 else rng.randint(60, 300))
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
            (_StockAsyncScheduler, TagmaAsyncScheduler)
            if self.asynchronous
            else (_StockScheduler, TagmaScheduler)
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
                    **self.settings,
                )
            )
            for kind, config in zip(classes, (stock_config, tagma_config), strict=True)
        )
        self.sides = [self.tagma] if alone else [self.tagma, self.stock]
        self.tagma.worker = self._worker(num_blocks=num_blocks, block_size=self.block_size)
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
