"""Runs both backends, one after the other in this process, through features of vLLM's engine.

    python feature_engine_run.py MODEL OUT.json ENGINE...

``ENGINES`` names what each engine is started with and what is asked of it. Everything happens at a
fixed step, so both backends must do the same; on tagma rows are relocated before each step
(``block_shuffle.py``), on stock only the token budgets are the same. Starting vLLM costs most of
such a run, so that one process serves all.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"  # whole hashes, as the pool knows them

import torch
from block_shuffle import BlockShuffle, CoreRelocation
from forked import in_a_fork
from safetensors.torch import load_file, save_file
from vllm import LLM, PoolingParams, SamplingParams
from vllm.config import KVEventsConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import BeamSearchParams, RequestOutputKind

VOCAB = 128
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": 32,  # the CPU attention backend's smallest
    "num_gpu_blocks_override": 20,  # six requests that grow to five blocks or more do not fit
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 384,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
    "disable_log_stats": False,
}


def force_async_scheduling() -> Callable[[bool], None]:
    """The CPU platform turns asynchronous scheduling off; this returns a switch that undoes it."""
    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]
    wanted = [False]

    def keep(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted[0]

    CpuPlatform.check_and_update_config = classmethod(keep)
    return lambda on: wanted.__setitem__(0, on)


class Engine:
    """An engine of one backend, whose core and worker live in this process."""

    def __init__(self, backend: str, model: str, options: dict[str, Any]) -> None:
        self.tagma = backend == "tagma"
        config: dict[str, Any] = {"kv_cache_backend": backend}
        if self.tagma:
            config["tagma"] = {"debug_slots": True, "check_invariants": True, "v2_interpreter": V2}
        self.llm = LLM(model, additional_config=config, **_ENGINE | options)
        self.core = self.llm.llm_engine
        self.scheduler: Any = self.core.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.moves = (CoreRelocation if self.tagma else BlockShuffle)(self.scheduler, seed=3)
        self.moves.enabled = self.tagma
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted


class Text:
    """Seeded prompts: some share a prefix of three blocks and a piece."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.shared = self(100)

    def __call__(self, length: int) -> list[int]:
        return [self._draw.randrange(3, VOCAB) for _ in range(length)]

    def behind_shared(self) -> list[int]:
        return self.shared + self(self._draw.randint(8, 40))


class Feature:
    """One feature on a living engine; ``seen`` is what must be equal."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.llm, self.core = engine.llm, engine.core
        self.text = Text(11)
        self.steps = 0
        self.seen: dict[str, Any] = {}
        engine.preemptions = 0
        engine.moves.restart()

    def add(self, name: str, tokens: list[int], params: Any) -> None:
        self.core.add_request(name, {"prompt_token_ids": tokens}, params)

    def step(self) -> list[Any]:
        self.steps += 1
        if self.steps > 2_000:
            waiting = {r.request_id: str(r.status) for r in self.engine.scheduler.requests.values()}
            raise AssertionError(f"requests wait, nothing runs: {waiting}")
        return list(self.core.step())

    def drain(self) -> None:
        while self.core.has_unfinished_requests():
            for output in self.step():
                self.take(output)

    def take(self, output: Any) -> None:
        self.seen[output.request_id] = {
            "tokens": [list(one.token_ids) for one in output.outputs],
            "cached": output.num_cached_tokens,
        }

    def report(self) -> dict[str, Any]:
        """What was seen, after the engine is empty again."""
        self.seen["steps"] = self.steps
        self.seen["preemptions"] = self.engine.preemptions
        self.seen["usage"] = self.engine.manager.usage
        self.seen["reset"] = self.llm.reset_prefix_cache()
        if self.engine.tagma:
            self.engine.manager.check_invariants()
        return self.seen


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more
    )


class Workload(Feature):
    """A prompt in chunks, shared prefixes, aborts, a second turn, and more than the pool holds."""

    aborts: ClassVar = {9: "shared-1", 20: "pressure-2"}

    def run(self) -> None:
        self.add("long", self.text(300), greedy(3))
        self.step()
        for i in range(3):
            self.add(f"shared-{i}", self.text.behind_shared(), greedy(12))
        self.drain()
        turn = self.seen["shared-0"]["tokens"][0]
        self.add("turn", [*self.text.shared, *turn], greedy(12))
        for i in range(7):
            prompt = self.text.behind_shared() if i % 2 else self.text(50)
            self.add(f"pressure-{i}", prompt, greedy(60))
        self.drain()

    def step(self) -> list[Any]:
        if name := self.aborts.get(self.steps):
            self.core.abort_request([name])
        return super().step()


class Short(Feature):
    """What Triton's interpreter can do in a while: shared prefixes, an abort, a full pool."""

    def run(self) -> None:
        for i in range(5):
            self.add(f"short-{i}", self.text.behind_shared(), greedy(16))
            for output in self.step():
                self.take(output)
        self.core.abort_request(["short-1"])
        self.drain()


class Events(Workload):
    """A consumer in a process of its own replays the KV events to what the pool holds."""

    reset_at = 40

    def run(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("event_subscriber.py"))]
        config = self.llm.llm_engine.vllm_config.kv_events_config
        subscriber = subprocess.Popen(
            [*command, config.endpoint, config.replay_endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert subscriber.stdout is not None
        assert subscriber.stdout.readline() == "subscribed\n"
        super().run()
        publisher = self.engine.scheduler.kv_event_publisher
        publisher._event_queue.join()
        published = 1 + publisher._buffer[-1][0]
        told, _ = subscriber.communicate(f"{published}\n", timeout=120)
        found = self.seen["subscriber"] = json.loads(told)
        pool = self.engine.manager.pool
        held = [h for h in found["ever"] if len(pool.lookup([bytes.fromhex(h)], 1))]
        self.seen["pool"] = {"hashes": held, "cached_blocks": pool.stats()["cached_blocks"]}

    def step(self) -> list[Any]:
        if self.steps == self.reset_at:
            assert self.llm.reset_prefix_cache(reset_running_requests=True)
        return super().step()


class Samples(Feature):
    """Several sampled answers to a prompt (n > 1), with logprobs of prompt and answers."""

    def run(self) -> None:
        for i in range(4):
            params = SamplingParams(
                n=3,
                output_kind=RequestOutputKind.FINAL_ONLY,  # all answers in one output
                temperature=0.9,  # from the engine's seed: vLLM fails on one of a request's own in
                # a prompt that comes in chunks, for want of generator offsets on a CPU
                max_tokens=12,
                ignore_eos=True,
                detokenize=False,
                logprobs=2,
                prompt_logprobs=2 if i % 2 else None,
            )
            self.add(f"sample-{i}", self.text.behind_shared(), params)
            self.step()
        self.drain()

    def take(self, output: Any) -> None:
        super().take(output)
        answers = [_logprobs(one.logprobs) for one in output.outputs]
        self.seen[output.request_id]["logprobs"] = answers
        self.seen[output.request_id]["prompt_logprobs"] = _logprobs(output.prompt_logprobs)


def _logprobs(positions: Any) -> list[dict[str, float]] | None:
    if positions is None:
        return None
    return [
        {str(token): one.logprob for token, one in sorted(position.items())} if position else {}
        for position in positions
    ]


class Beams(Feature):
    """Beam search, whose beams are requests that share all but their last tokens."""

    def run(self) -> None:
        prompts = [{"prompt_token_ids": self.text.behind_shared()} for _ in range(2)]
        params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
        for i, output in enumerate(self.llm.beam_search(prompts, params)):
            self.seen[f"beam-{i}"] = [[s.tokens, s.cum_logprob] for s in output.sequences]


class Sessions(Feature):
    """Streamed input: the next part is there before a turn ends, comes at once, or comes late.

    A session that waits is never preempted, so that all of them must fit the pool.
    """

    delays = (-1, 0, 6)  # steps after the end of a turn; -1: while it runs
    turns = 3

    def run(self) -> None:
        self.send = {name: (self._input(), 0) for name in self._names()}
        self.sent = dict.fromkeys(self._names(), 0)
        self.got: dict[str, list[int]] = {name: [] for name in self._names()}
        for i in range(5):
            self.add(f"beside-{i}", self.text.behind_shared(), greedy(30))
        while self.core.has_unfinished_requests() or self.send:
            for name in [n for n, (_, at) in self.send.items() if at <= self.steps]:
                self._send(name, self.send.pop(name)[0])
            for output in self.step():
                self.take(output)

    def _names(self) -> list[str]:
        return [f"session{delay}" for delay in self.delays]

    def _input(self) -> list[int]:
        return self.text(self.text._draw.choice([7, 24, 40]))

    def _send(self, name: str, tokens: list[int]) -> None:
        """The next input, or behind the last one the word that there is none."""
        self.sent[name] += 1
        last = self.sent[name] > self.turns
        params = greedy(10, output_kind=RequestOutputKind.DELTA)
        request = self.core.input_processor.process_inputs(
            name,
            {"prompt_token_ids": tokens},
            params,
            supported_tasks=self.core.get_supported_tasks(),
            resumable=not last,
        )
        request.external_req_id = name
        self.core.output_processor.add_request(request, None, None, 0)
        # As between processes: vLLM's front end and its core each extend their list of tokens.
        self.core.engine_core.add_request(copy.deepcopy(request))
        if name == "session-1" and not last:
            self.send[name] = (self._input(), self.steps + 3)

    def take(self, output: Any) -> None:
        name = output.request_id
        if not name.startswith("session"):
            super().take(output)
            return
        (part,) = output.outputs
        self.got[name] += part.token_ids
        self.seen[name] = {"tokens": self.got[name], "turns": self.sent[name]}
        if part.finish_reason and name != "session-1" and self.sent[name] <= self.turns:
            delay = int(name.removeprefix("session"))
            self.send[name] = (self._input(), self.steps + delay)


class Resets(Feature):
    """The prefix cache is reset while requests run: they are preempted and compute again."""

    at = (4, 5, 13, 21)

    def run(self) -> None:
        for i in range(6):
            self.add(f"reset-{i}", self.text.behind_shared(), greedy(24))
        while self.core.has_unfinished_requests():
            for output in self.step():
                self.take(output)
            if self.steps in self.at:
                running = len(self.engine.scheduler.running)
                done = self.llm.reset_prefix_cache(reset_running_requests=True)
                self.seen[f"reset-at-{self.steps}"] = [running, done, self.engine.manager.usage]
            elif self.steps == 8:
                self.seen["refused-while-running"] = self.llm.reset_prefix_cache()


class Pooling(Feature):
    """Vectors of prompts that share a prefix, in chunks, twice; more than the pool holds."""

    task = "embed"

    def run(self) -> None:
        prompts = [self.text.behind_shared() for _ in range(6)]
        prompts += [self.text(length) for length in (300, 250, 200, 150, 90, 260)]
        for wave in range(2):
            for i, tokens in enumerate(prompts[wave::2] + prompts[:4]):
                self.add(f"{wave}-{i}", tokens, PoolingParams(task=self.task))
            self.drain()

    def take(self, output: Any) -> None:
        self.seen[output.request_id] = {
            "vector": output.outputs.data.float().flatten().tolist(),
            "cached": output.num_cached_tokens,
        }


class TokenPooling(Pooling):
    """A vector for each token."""

    task = "token_embed"


class Classes(Pooling):
    """A class for each prompt."""

    task = "classify"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an engine is started with, and what is asked of it."""

    engine: dict[str, Any] = field(default_factory=dict)
    features: tuple[type[Feature], ...] = ()
    asynchronous: bool = False
    backends: tuple[str, ...] = ("paged", "tagma")
    model: Callable[[Path], Path] = lambda folder: folder


def with_classes(model: Path) -> Path:
    """The same model, with three classes instead of words at its end."""
    folder = model.with_name(f"{model.name}-classes")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    config["id2label"] = {str(i): f"class {i}" for i in range(3)}
    config["label2id"] = {name: int(i) for i, name in config["id2label"].items()}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    weights["score.weight"] = torch.randn(3, config["hidden_size"], generator=generator)
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors")
    return folder


def _events(folder: str) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay",
    )


_POOLING = {"runner": "pooling", "skip_tokenizer_init": False}

ENGINES: dict[str, Plan] = {
    "sync": Plan(
        engine={"skip_tokenizer_init": False}, features=(Samples, Beams, Sessions, Resets)
    ),
    "async": Plan(asynchronous=True, features=(Workload, Samples, Sessions, Resets)),
    "async_v2": Plan(
        engine={"dtype": "bfloat16", "num_gpu_blocks_override": 9, "max_model_len": 256},
        asynchronous=True,
        features=(Short,),
    ),
    # Not with a model in float32: vLLM's CPU kernels then write behind the end of the cache.
    "float16": Plan(
        engine={"kv_cache_dtype": "float16", "dtype": "bfloat16"}, features=(Workload,)
    ),
    "fp8_e4m3": Plan(engine={"kv_cache_dtype": "fp8_e4m3"}, features=(Workload,)),
    "fp8_e5m2": Plan(engine={"kv_cache_dtype": "fp8_e5m2"}, features=(Workload,)),
    "events": Plan(
        engine={"kv_events_config": _events(tempfile.mkdtemp())},
        features=(Events,),
        backends=("tagma",),
    ),
    "embed": Plan(engine=_POOLING, features=(Pooling,)),
    "token_embed": Plan(engine=_POOLING, features=(TokenPooling,)),
    "classify": Plan(engine=_POOLING, features=(Classes,), model=with_classes),
}


def run(plan: Plan, backend: str, model: str) -> dict[str, Any]:
    """Starts an engine and asks; it ends with the process."""
    engine = Engine(backend, str(plan.model(Path(model))), plan.engine)
    assert engine.scheduler.scheduler_config.async_scheduling == plan.asynchronous
    report: dict[str, Any] = {}
    for kind in plan.features:
        feature = kind(engine)
        feature.run()
        report[kind.__name__] = feature.report()
    report |= {
        "scheduler": type(engine.scheduler).__name__,
        "manager": type(engine.manager).__name__,
        "copies": engine.moves.copies,
        "rows": engine.moves.rows,
    }
    if engine.tagma:
        report["slot_audits"] = engine.llm.collective_rpc("slot_audit_counters")
    return report


def main(model: str, out: str, *names: str) -> None:
    asynchronous = force_async_scheduling()
    report: dict[str, dict[str, Any]] = {}
    for name in names:
        plan = ENGINES[name]
        asynchronous(plan.asynchronous)
        report[name] = {}
        for backend in plan.backends:
            began = time.monotonic()
            report[name][backend] = in_a_fork(run, plan, backend, model)
            Path(out).write_text(json.dumps(report, indent=1))
            print(f"{name} on {backend}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
