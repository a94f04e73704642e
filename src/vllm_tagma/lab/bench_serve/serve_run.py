"""One run: a server, the stages it is put through, and what is read from it meanwhile."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench_serve import commands, serve_kernels, serve_metrics
from vllm_tagma.lab.bench_serve.gpu import Gpu, sampling_command
from vllm_tagma.lab.bench_serve.process import Group
from vllm_tagma.lab.bench_serve.record import RunRecord, StageRecord
from vllm_tagma.lab.bench_serve.serve_plan import Run, Stage
from vllm_tagma.lab.bench_serve.serve_sampler import Sampler
from vllm_tagma.lab.bench_serve.serve_settings import Settings

_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 60.0
_CLIENT_STOP_SECONDS = 5.0
# Per-request lists stay in the client's own file.
_DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
}
_COUNTERS = {
    "preemptions": serve_metrics.PREEMPTIONS,
    "prefix_queries": serve_metrics.PREFIX_QUERIES,
    "prefix_hits": serve_metrics.PREFIX_HITS,
    "finished": serve_metrics.FINISHED,
}
_PARTS = ("sum", "count")

Say = Callable[[str], None]
Learn = Callable[[str, float], None]


class RunFailure(TagmaError, RuntimeError):
    """A server or client that did not do its part. ``log_tail``: the last lines of its log."""

    def __init__(self, reason: str, *, log: Path, log_tail: str) -> None:
        super().__init__(f"{reason} (log: {log})")
        self.log_tail = log_tail


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a run needs beside its plan.

    ``folder``: where its files go. ``workload``: holds ``STAGE.jsonl``. ``say`` prints a line;
    ``learn`` is told how long each phase took.
    """

    settings: Settings
    folder: Path
    workload: Path
    gpus: Sequence[Gpu]
    say: Say
    learn: Learn

    @property
    def base(self) -> str:
        """The server's address."""
        return serve_metrics.base_url(self.settings.host, self.settings.port)


def execute(run: Run, context: Context) -> RunRecord:
    """Runs it and returns its record; a failure is recorded, not raised.

    Whatever was started is stopped before this returns or raises.
    """
    record = RunRecord(
        index=run.index,
        name=run.name,
        backend=run.backend,
        pair=run.pair,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        variables=commands.own_variables(context.settings, run=run),
    )
    context.folder.mkdir(parents=True, exist_ok=True)
    try:
        _serve_and_measure(run, record, context)
        if run.pair is None:
            record.kernels = serve_kernels.analyse(context.folder / "traces")
    except (RunFailure, serve_kernels.TraceError) as failure:
        record.error = str(failure)
        record.log_tail = getattr(failure, "log_tail", "")
    return record


def _serve_and_measure(run: Run, record: RunRecord, context: Context) -> None:
    settings, folder = context.settings, context.folder
    command = commands.server_command(settings, run=run, traces=(folder / "traces").absolute())
    record.commands["server"] = command
    begin = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(
            Group(
                command,
                env=commands.environment(settings, run=run),
                log=folder / "server.log",
                stop_timeout=settings.stop_timeout,
                dies_with_us=True,
            )
        )
        gpu_log = _start_gpu_log(stack, context)
        _wait_until_ready(server, base=context.base, timeout=settings.ready_timeout)
        record.start_seconds = round(time.monotonic() - begin, 2)
        context.learn("start", record.start_seconds)
        context.say(f"server ready after {record.start_seconds:.0f} s")
        sampler = stack.enter_context(
            Sampler(
                base=context.base,
                pid=server.pid,
                interval=settings.sample_interval,
                begin=begin,
                path=folder / "samples.jsonl",
                gpu_log=gpu_log,
            )
        )
        for stage in run.stages:
            done = _measure_stage(stage, record, context, server=server, sampler=sampler)
            record.stages[stage.name] = done
            context.learn(stage.name, done.seconds)
            context.say(_stage_line(stage, done))
        sampler.stage = ""
        stopping = time.monotonic()
    record.stop_seconds = round(time.monotonic() - stopping, 2)
    context.learn("stop", record.stop_seconds)


def _start_gpu_log(stack: ExitStack, context: Context) -> Path | None:
    settings, log = context.settings, context.folder / "gpu.csv"
    if settings.device != "cuda" or not context.gpus:
        return None
    indices = [gpu.number for gpu in context.gpus]
    stack.enter_context(
        Group(
            sampling_command(indices=indices, interval=settings.sample_interval),
            env=commands.environment(settings),
            log=log,
            stop_timeout=_CLIENT_STOP_SECONDS,
        )
    )
    return log


def _wait_until_ready(server: Group, *, base: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not serve_metrics.is_healthy(base):
        _require_alive(server, "before it was ready")
        if time.monotonic() > deadline:
            raise RunFailure(
                f"the server was not ready after {timeout:.0f} s; --ready-timeout allows more",
                log=server.log,
                log_tail=server.tail(),
            )
        time.sleep(_POLL_SECONDS)
    # Somebody else may answer where ours could not listen.
    _require_alive(server, "before it was ready")


def _require_alive(server: Group, when: str) -> None:
    status = server.poll()
    if status is not None:
        raise RunFailure(
            f"the server ended with status {status} {when}", log=server.log, log_tail=server.tail()
        )


def _measure_stage(
    stage: Stage, record: RunRecord, context: Context, *, server: Group, sampler: Sampler
) -> StageRecord:
    settings, folder = context.settings, context.folder
    result = folder / f"{stage.name}.json"
    command = commands.client_command(
        settings,
        stage=stage,
        requests=context.workload / f"{stage.name}.jsonl",
        result=result,
        num_requests=stage.num_requests,
    )
    record.commands[stage.name] = command
    before = _snapshot(context.base)
    sampler.stage = stage.name
    first_sample = len(sampler.samples)
    begin = time.monotonic()
    client = Group(
        command,
        env=commands.environment(settings),
        log=folder / f"{stage.name}.log",
        stop_timeout=_CLIENT_STOP_SECONDS,
    )
    with client:
        _wait_for_client(stage, context, client=client, server=server, sampler=sampler)
    seconds = round(time.monotonic() - begin, 2)
    text = serve_metrics.fetch(context.base) or ""
    (folder / "metrics.prom").write_text(text, encoding="utf-8")
    answer = _answer_of(stage, result, client)
    after = serve_metrics.parse(text)
    record.cache = after.cache
    record.num_blocks = _integer(after.cache.get("num_gpu_blocks"))
    record.block_size = _integer(after.cache.get("block_size"))
    samples = sampler.samples[first_sample:]
    usage = [s["kv_usage"] for s in samples if s["kv_usage"] is not None]
    peak = max(usage, default=None)
    # One block, vLLM's null block, is never handed out.
    usable = record.num_blocks - 1 if record.num_blocks else None
    return StageRecord(
        seconds=seconds,
        client={name: value for name, value in answer.items() if name not in _DETAILS},
        counters={name: _difference(metric, before, after) for name, metric in _COUNTERS.items()},
        kv={
            "peak_usage": peak,
            "peak_blocks": None if peak is None or usable is None else round(peak * usable),
            "samples": float(len(usage)),
        },
        memory={
            "rss_peak": max((s["rss_bytes"] for s in samples if s["rss_bytes"]), default=None),
            "gpu_peak": max((s["gpu_bytes"] for s in samples if s["gpu_bytes"]), default=None),
        },
        ranges=_ranges(before, after, samples),
    )


def _wait_for_client(
    stage: Stage, context: Context, *, client: Group, server: Group, sampler: Sampler
) -> None:
    begin = beat = time.monotonic()
    finished = sampler.finished or 0.0
    timeout = context.settings.stage_timeout
    while (status := client.poll()) is None:
        _require_alive(server, f"during {stage.name}")
        now = time.monotonic()
        if now - begin > timeout:
            raise RunFailure(
                f"{stage.name} took longer than {timeout:.0f} s; --stage-timeout allows more",
                log=client.log,
                log_tail=client.tail(),
            )
        if now - beat > _HEARTBEAT_SECONDS:
            beat = now
            done = (sampler.finished or 0.0) - finished
            context.say(f"{stage.name}: {done:.0f} of {stage.num_requests} requests")
        time.sleep(_POLL_SECONDS)
    if status:
        _require_alive(server, f"during {stage.name}")
        raise RunFailure(
            f"the client ended with status {status} in {stage.name}",
            log=client.log,
            log_tail=client.tail(),
        )


def _answer_of(stage: Stage, result: Path, client: Group) -> dict[str, Any]:
    """What the client wrote. Raises RunFailure for a stage in which a request failed."""
    try:
        answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        completed = answer["completed"]
        errors = [error for error in answer["errors"] if error]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailure(
            f"the client left no result for {stage.name} that can be read ({error!r})",
            log=client.log,
            log_tail=client.tail(),
        ) from None
    if completed != stage.num_requests or errors:
        first = errors[0].strip().splitlines()[-1] if errors else "no reason given"
        raise RunFailure(
            f"{stage.name}: {completed} of {stage.num_requests} requests succeeded; the first "
            f"failure: {first}",
            log=client.log,
            log_tail=client.tail(),
        )
    return answer


def _snapshot(base: str) -> serve_metrics.Snapshot:
    text = serve_metrics.fetch(base)
    return serve_metrics.parse(text) if text else serve_metrics.Snapshot()


def _difference(
    name: str, before: serve_metrics.Snapshot, after: serve_metrics.Snapshot
) -> float | None:
    end = after.get(name)
    return None if end is None else end - (before.get(name) or 0.0)


def _ranges(
    before: serve_metrics.Snapshot, after: serve_metrics.Snapshot, samples: Sequence[dict[str, Any]]
) -> dict[str, float | None]:
    """What the tagma backend adds to /metrics, under its names there without the prefix.

    Counters as differences over the stage. Of histograms the mean of the values that came in, and
    the bounds that half and 99 % of them do not exceed. Gauges say nothing when the load has ended,
    so of them only the sampled greatest number of ranges.
    """
    found: dict[str, float | None] = {}
    for name in after.values:
        if name.startswith(serve_metrics.TAGMA_PREFIX) and name.endswith("_total"):
            found[name.removeprefix(serve_metrics.TAGMA_PREFIX)] = _difference(name, before, after)
    for name, buckets in after.buckets.items():
        if name.startswith(serve_metrics.TAGMA_PREFIX):
            short = name.removeprefix(serve_metrics.TAGMA_PREFIX)
            total, count = (_difference(f"{name}_{part}", before, after) for part in _PARTS)
            found[f"{short}_mean"] = None if total is None or not count else total / count
            taken = serve_metrics.bucket_difference(buckets, before.buckets.get(name, {}).items())
            for label, share in (("p50", 0.5), ("p99", 0.99)):
                bound = serve_metrics.bucket_quantile(taken, share)
                # JSON has no infinity.
                found[f"{short}_{label}"] = None if bound == float("inf") else bound
    if found:
        most = [s["max_ranges"] for s in samples if s["max_ranges"] is not None]
        found["max_ranges_peak"] = max(most, default=None)
    return found


def _integer(text: str | None) -> int | None:
    with contextlib.suppress(TypeError, ValueError):
        return int(text)  # type: ignore[arg-type]
    return None


def _stage_line(stage: Stage, done: StageRecord) -> str:
    client = done.client
    return (
        f"{stage.name}: {stage.num_requests} requests, "
        f"{client.get('output_throughput', 0.0):.1f} output tokens/s, first token after "
        f"{client.get('median_ttft_ms', 0.0):.0f} ms, then one every "
        f"{client.get('median_tpot_ms', 0.0):.1f} ms"
    )
