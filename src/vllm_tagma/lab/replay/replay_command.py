"""``tagma replay``: the sub-command, from its options to table, result file and pictures."""

from __future__ import annotations

import datetime
import logging
import shlex
import sys
from enum import StrEnum
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_tagma.config import Backend
from vllm_tagma.errors import ConfigError, TagmaError
from vllm_tagma.lab.quiet_vllm import quiet_vllm

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from vllm_tagma.lab.replay.replay_settings import Settings
    from vllm_tagma.lab.replay.trace import Trace


class Backends(StrEnum):
    both = "both"
    paged = "paged"
    tagma = "tagma"


_BACKENDS: dict[Backends, tuple[Backend, ...]] = {
    Backends.both: ("paged", "tagma"),
    Backends.paged: ("paged",),
    Backends.tagma: ("tagma",),
}


class Format(StrEnum):
    """The names in ``formats.PARSERS``, which are not imported for a look at the help."""

    mooncake = "mooncake"
    azure = "azure"
    burstgpt = "burstgpt"
    sharegpt = "sharegpt"
    openai_batch = "openai-batch"
    vllm_bench = "vllm-bench"
    vllm_log = "vllm-log"
    tagma = "tagma"


class Load(StrEnum):
    chat = "chat"
    agent = "agent"
    mixed = "mixed"


class Arrivals(StrEnum):
    closed = "closed"
    trace = "trace"


class MaxTokens(StrEnum):
    open = "open"
    known = "known"


class Compaction(StrEnum):
    off = "off"
    idle = "idle"
    live = "live"


SHIPPED = "data/mixed.jsonl"
"""The trace that is replayed when none is named, in our own format."""

_BAD_LINES_SHOWN = 5
DEFAULT_REGIONS = 64
TRACE_SEQS, LOAD_SEQS, SHIPPED_SEQS = 64, 128, 16


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Trace file, or - for standard input; without one, the small trace that ships "
            "with tagma."
        ),
    ] = None,
    load: Annotated[
        Load | None, typer.Option("--load", help="Generate a load instead of reading a trace.")
    ] = None,
    backend: Annotated[
        Backends, typer.Option("--backend", help="Managers to replay with.")
    ] = Backends.both,
    kind: Annotated[
        Format | None, typer.Option("--format", help="Format of TRACE (default: by its content).")
    ] = None,
    trace_block_size: Annotated[
        int | None,
        typer.Option(
            "--trace-block-size",
            min=1,
            help="Prompt tokens that a hash id of TRACE covers (default: found from its lengths).",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Requests to replay (default: all).")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="Blocks of the pool, or a multiple of the running set.")
    ] = "1.5x",
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")] = 16,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs",
            min=1,
            help="Requests that run at once (default: 64, loads 128, shipped trace 16).",
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=1, help="Tokens in a step.")
    ] = 8192,
    watermark: Annotated[
        float, typer.Option("--watermark", min=0.0, max=0.99, help="Share that admission spares.")
    ] = 0.02,
    arrivals: Annotated[
        Arrivals,
        typer.Option("--arrivals", help="Always --max-num-seqs in the system, or by timestamps."),
    ] = Arrivals.closed,
    speed: Annotated[
        float, typer.Option("--speed", min=1e-6, help="Timestamps are divided by this.")
    ] = 1.0,
    step_ms: Annotated[
        float, typer.Option("--step-ms", min=0.0, help="Step-time model: milliseconds a step.")
    ] = 8.0,
    token_us: Annotated[
        float, typer.Option("--token-us", min=0.0, help="Step-time model: microseconds a token.")
    ] = 30.0,
    max_tokens: Annotated[
        MaxTokens,
        typer.Option("--max-tokens", help="Tell vLLM each output's length beforehand, or not."),
    ] = MaxTokens.open,
    compaction: Annotated[
        Compaction | None, typer.Option("--compaction", help="tagma: blocks that may be moved.")
    ] = None,
    copy_budget: Annotated[
        int | None, typer.Option("--copy-budget", min=0, help="tagma: blocks moved in a step.")
    ] = None,
    regions: Annotated[
        int | None,
        typer.Option(
            "--regions",
            min=1,
            help="Stretches of memory with a block's KV (default: 64; with --model, 2 a layer).",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="A model's config.json, or its folder: the pool then holds the KV-cache groups "
            "of that model (default: full attention in every layer).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the generated loads.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every bad line.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Folder for pictures of the pool over time.")
    ] = None,
) -> None:
    """Replay a trace through vLLM's scheduler, with its KV-cache manager and with tagma's.

    No GPU and no model: lengths, times and shared prefixes come from the trace.

    Exit status: 0 replayed, 1 failed, 2 wrong options or no usable trace.

    Example: tagma replay trace.jsonl --memory 2x --json result.json
    """
    quiet_vllm()
    from vllm_tagma.lab.replay.replay_settings import Settings, SettingsError
    from vllm_tagma.lab.replay.trace import TraceError

    seqs = max_num_seqs
    if seqs is None:
        seqs = LOAD_SEQS if load else TRACE_SEQS if trace else SHIPPED_SEQS
    try:
        found = _trace(
            trace,
            load,
            kind=kind,
            trace_block_size=trace_block_size,
            limit=limit,
            seed=seed,
            seqs=seqs,
            strict=strict,
        )
        _report_reading(found, verbose=verbose)
        settings = Settings(
            block_size=block_size,
            max_num_seqs=seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            watermark=watermark,
            memory=memory,
            arrivals=arrivals.value,
            speed=speed,
            step_ms=step_ms,
            token_us=token_us,
            max_tokens=max_tokens.value,
            regions=regions or (0 if model else DEFAULT_REGIONS),
            model=str(model) if model else None,
            compaction=compaction.value if compaction else None,
            copy_budget=copy_budget,
        )
        _run(
            found,
            settings,
            _BACKENDS[backend],
            seed=seed,
            limit=limit,
            json_file=json_file,
            plot=plot,
        )
    except (TraceError, SettingsError, ConfigError) as error:
        typer.echo(f"tagma replay: {error}", err=True)
        raise typer.Exit(2) from None
    except (TagmaError, OSError) as error:
        typer.echo(f"tagma replay: {error}", err=True)
        raise typer.Exit(1) from None


def _trace(
    path: Path | None,
    load: Load | None,
    *,
    kind: Format | None,
    trace_block_size: int | None,
    limit: int | None,
    seed: int,
    seqs: int,
    strict: bool,
) -> Trace:
    from vllm_tagma.lab.replay import formats, loads

    if load is not None:
        if path is not None or kind is not None or trace_block_size is not None:
            raise typer.BadParameter(
                "--load generates the requests: give no TRACE, no --format, no --trace-block-size"
            )
        return loads.generate(
            load.value, requests=limit or loads.DEFAULT_REQUESTS, running=seqs, seed=seed
        )
    if path is None:
        if kind is not None or trace_block_size is not None:
            raise typer.BadParameter("--format and --trace-block-size need a TRACE to read")
        return shipped_trace(limit)
    return formats.read(
        path,
        kind=kind.value if kind else None,
        trace_block_size=trace_block_size,
        limit=limit,
        strict=strict,
    )


def shipped_trace(limit: int | None) -> Trace:
    """The first ``limit`` requests of the trace that ships here, or all."""
    from vllm_tagma.lab.replay import formats

    with resources.as_file(resources.files("vllm_tagma.lab.replay") / SHIPPED) as shipped:
        return formats.read(shipped, limit=limit, strict=True)


def _report_reading(trace: Trace, *, verbose: bool) -> None:
    for note in trace.notes:
        typer.echo(f"{trace.name}: {note}", err=True)
    shown = trace.bad if verbose else trace.bad[:_BAD_LINES_SHOWN]
    for line in shown:
        typer.echo(f"{trace.name}, {line.place}: {line.reason}", err=True)
    if trace.bad:
        rest = len(trace.bad) - len(shown)
        more = f", {rest} more with --verbose" if rest else ""
        typer.echo(f"{trace.name}: {len(trace.bad)} bad lines skipped{more}", err=True)


def _run(
    trace: Trace,
    settings: Settings,
    backends: tuple[Backend, ...],
    *,
    seed: int,
    limit: int | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    from rich.console import Console

    from vllm_tagma import versions
    from vllm_tagma.lab.bench import environment
    from vllm_tagma.lab.replay.replay_settings import pool_blocks
    from vllm_tagma.lab.replay.result import Result
    from vllm_tagma.lab.report.charts import pyplot

    if plot is not None:
        pyplot()  # says so before the replay if it cannot draw
    for folder in (plot, json_file and json_file.parent):
        if folder is not None:  # a replay takes minutes: it must not end without a place to go
            folder.mkdir(parents=True, exist_ok=True)
    versions.require_supported_vllm()
    from vllm_tagma.lab.replay.plots import Drawn, write_plots
    from vllm_tagma.lab.replay.pool_sampler import PoolSampler
    from vllm_tagma.lab.replay.replay_run import layout_of, replay_backend
    from vllm_tagma.lab.replay.replay_table import print_result

    logging.getLogger("vllm").setLevel(logging.ERROR)
    layout = layout_of(settings, trace.requests)
    num_blocks = pool_blocks(settings, trace.requests, layout.footprint)
    result = Result(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["tagma", *sys.argv[1:]]),
        trace=trace,
        settings=settings,
        seed=seed,
        limit=limit,
        num_blocks=num_blocks,
        environment=environment.capture(),
    )
    drawn: dict[str, Drawn] = {}
    with _progress() as progress:
        tasks = {name: progress.add_task(name, total=len(trace.requests)) for name in backends}
        for name, task in tasks.items():
            progress.reset(task)
            sampler = PoolSampler(num_blocks) if plot is not None else None
            result.backends[name], replayed = replay_backend(
                name,
                trace.requests,
                settings,
                num_blocks=num_blocks,
                layout=layout,
                progress=partial(_advance, progress, task),
                on_step=sampler,
            )
            if sampler is not None:
                drawn[name] = Drawn(replay=replayed, sampler=sampler)
    print_result(Console(), result)
    if json_file is not None:
        result.write(json_file)
        typer.echo(f"{json_file} written")
    if plot is not None:
        for path in write_plots(plot, drawn):
            typer.echo(f"{path} written")


def _advance(progress: Progress, task: TaskID, ended: int) -> None:
    progress.update(task, completed=ended)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        refresh_per_second=2,
        transient=True,
        disable=not console.is_terminal,
    )
