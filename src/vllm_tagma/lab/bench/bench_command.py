"""``tagma bench host``: the sub-command, from its options to the result file.

``tagma bench serve`` and ``tagma bench transfer`` have their own modules and are only joined to the
group here.
"""

from __future__ import annotations

import datetime
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench_serve.serve_command import register
from vllm_tagma.lab.bench_transfer.transfer_command import register as register_transfer
from vllm_tagma.lab.quiet_vllm import quiet_vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress

    from vllm_tagma.lab.bench.bench_plan import Effort, Planned
    from vllm_tagma.lab.bench.schema import Result, Scenario

app = typer.Typer(name="bench", help="Measure this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure this machine."""


register(app)
register_transfer(app)


@app.command()
def host(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: fewer rounds, no engine.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result here, for 'tagma report'.")
    ] = None,
    compare_with: Annotated[
        Path | None, typer.Option("--compare", help="Result of an earlier run: show what moved.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Scenarios whose name contains this; can be repeated."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Rounds of each scenario (full run: 20).")
    ] = None,
    cpu: Annotated[
        int | None, typer.Option("--cpu", help="CPU to run on (default: the last available).")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the scenarios and stop.")] = False,
) -> None:
    """What the host side costs, against vLLM's own manager in the same process.

    No GPU is used and no model is downloaded. Exit status: 0 measured (targets missed or not),
    1 failed, 2 wrong options. Example: tagma bench host --json host.json
    """
    try:
        _run(
            quick=quick,
            json_file=json_file,
            compare_with=compare_with,
            only=only or [],
            rounds=rounds,
            cpu=cpu,
            list_only=list_only,
        )
    except TagmaError as error:
        typer.echo(f"tagma bench: {error}", err=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        typer.echo(f"tagma bench: {error}", err=True)
        raise typer.Exit(2) from None


def _run(
    *,
    quick: bool,
    json_file: Path | None,
    compare_with: Path | None,
    only: list[str],
    rounds: int | None,
    cpu: int | None,
    list_only: bool,
) -> None:
    quiet_vllm()
    from rich.console import Console

    from vllm_tagma import versions
    from vllm_tagma.lab.bench import bench_plan, bench_table, environment, schema
    from vllm_tagma.lab.bench.bench_compare import compare

    base = bench_plan.QUICK if quick else bench_plan.FULL
    effort = bench_plan.Effort(quick=quick, rounds=rounds or base.rounds, scale=base.scale)
    cpus = environment.pinned_cpus()
    chosen = bench_plan.selected(scenarios(effort, cpus=cpus), only)
    if list_only:
        for scenario in chosen:
            typer.echo(f"{scenario.name:40} {scenario.title}")
        return
    old = schema.read(compare_with) if compare_with is not None else None
    versions.require_supported_vllm()
    environment.pin(cpu)
    logging.getLogger("vllm").setLevel(logging.ERROR)

    console = Console()
    watch = bench_plan.Stopwatch()
    captured = environment.capture()
    captured["pinning"]["engine_cpus"] = cpus
    measured, skipped = _measure(chosen, effort)
    result = schema.Result(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["tagma", *sys.argv[1:]]),
        quick=quick,
        seconds=round(watch.seconds, 1),
        environment=captured,
        scenarios=measured,
        skipped=skipped,
    )
    _warn_about_noise(result)
    bench_table.print_result(console, result)
    if json_file is not None:
        schema.write(result, json_file)
        console.print(f"{json_file} written after {result.seconds:.0f} s")
    if old is not None:
        bench_table.print_comparison(console, compare(old, result), old=str(compare_with))


def scenarios(effort: Effort, *, cpus: Sequence[int]) -> list[Planned]:
    """All scenarios, in the order of the report. ``cpus``: where engines may run."""
    from vllm_tagma.lab.bench.bench_engine import engine_scenarios
    from vllm_tagma.lab.bench.bench_manager import manager_scenarios
    from vllm_tagma.lab.bench.bench_memory import memory_scenarios
    from vllm_tagma.lab.bench.bench_moves import move_scenarios
    from vllm_tagma.lab.bench.bench_native import native_scenarios
    from vllm_tagma.lab.bench.bench_scheduler import scheduler_scenarios
    from vllm_tagma.lab.bench.bench_slot_kernel import slot_kernel_scenarios

    return [
        *native_scenarios(effort),
        *slot_kernel_scenarios(effort),
        *move_scenarios(effort),
        *manager_scenarios(effort),
        *memory_scenarios(effort),
        *scheduler_scenarios(effort),
        *engine_scenarios(effort, cpus=cpus),
    ]


def _measure(chosen: list[Planned], effort: Effort) -> tuple[list[Scenario], dict[str, str]]:
    from vllm_tagma.lab.bench import bench_plan

    with _progress() as progress:
        total = sum(p.num_rounds(effort) for p in chosen if p.quick or not effort.quick)
        task = progress.add_task("", total=total)

        def advance(_: Planned) -> None:
            progress.advance(task)
            progress.refresh()

        return bench_plan.run(
            chosen,
            effort=effort,
            on_start=lambda p: progress.update(task, description=p.name, refresh=True),
            on_round=advance,
        )


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # Redrawn between rounds only: a thread that draws would be measured with the rest.
    return Progress(
        TextColumn("{task.description:40}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
    )


def _warn_about_noise(result: Result) -> None:
    machine = result.environment["machine"]
    load, cpus = machine["load_average"][0], machine["cpus_online"] or 1
    if load > 0.5 * cpus:
        typer.echo(
            f"note: the load average was {load} on {cpus} CPUs when the run began; ratios are "
            "taken round by round and hold up better than times do",
            err=True,
        )
