"""The whole series: prepared, run, resumed, reported."""

from __future__ import annotations

import datetime
import hashlib
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench_serve import commands, dataset, identity, preflight, record, workload
from vllm_tagma.lab.bench_serve.gpu import Gpu, gpus
from vllm_tagma.lab.bench_serve.record import Plan, RunRecord, SeriesRecord
from vllm_tagma.lab.bench_serve.serve_plan import Run, TimeLeft, differences, runs_of
from vllm_tagma.lab.bench_serve.serve_run import Context, execute
from vllm_tagma.lab.bench_serve.serve_settings import Settings

Say = Callable[[str], None]


class SeriesError(TagmaError, RuntimeError):
    """The output directory does not fit what was asked for."""


class RunsFailed(TagmaError, RuntimeError):
    """The series ended with failed runs; what was measured is on disk."""


def measure(settings: Settings, *, output: Path, resume: bool, say: Say) -> list[Path]:
    """Runs all that is missing in ``output`` and writes the report; returns its two files.

    Raises:
        PreflightError: something is missing; nothing was started.
        SeriesError: ``output`` holds a series already, or (``resume``) another one.
        RunsFailed: a run failed; the complete ones are kept.
    """
    begin = time.monotonic()
    found = gpus() if settings.device == "cuda" else []
    _check_output(output, resume=resume)
    missing = preflight.problems(settings, output=output, gpus=found)
    if missing:
        raise preflight.PreflightError(missing)
    plan = Plan(settings=settings.to_json(), facts=identity.facts(settings, found))
    series = _open(output, plan, resume=resume, say=say)
    runs = runs_of(settings)
    series.runs = [run.name for run in runs]
    series.environment = identity.capture(found)
    record.write_series(series, output)  # from here on it can be resumed
    if not series.workload:
        say("preparing the requests")
        series.workload = prepare(settings, runs, output / "workload")
        record.write_series(series, output)
    try:
        failed = _run_all(runs, settings, output, found, say)
    finally:
        series.seconds = round(series.seconds + time.monotonic() - begin, 1)
        record.write_series(series, output)
    written = write_report(output, say)
    if failed:
        raise RunsFailed(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. The complete ones are "
            f"in {output}; --resume repeats only the others."
        )
    return written


def _check_output(output: Path, *, resume: bool) -> None:
    if resume and not record.is_series(output):
        raise SeriesError(
            f"--resume: {output} holds no series (no series.json). Without --resume it is begun."
        )
    if not resume and output.exists() and (not output.is_dir() or any(output.iterdir())):
        what = "a series already" if record.is_series(output) else "something else"
        raise SeriesError(
            f"--output {output} holds {what}. Continue a series with --resume, or name a folder "
            "that is empty or does not exist."
        )


def _open(output: Path, plan: Plan, *, resume: bool, say: Say) -> SeriesRecord:
    """The series on disk if it is this one, else a new one."""
    if not resume:
        output.mkdir(parents=True, exist_ok=True)
        return SeriesRecord(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=shlex.join(["tagma", *sys.argv[1:]]),
            plan=plan,
            environment={},
        )
    series = record.read_series(output)
    changed = differences(asdict(series.plan), asdict(plan))
    if changed:
        lines = "\n  ".join(changed)
        raise SeriesError(
            f"--resume: what was measured in {output} is not what would be measured now:\n  {lines}"
            "\nRuns of the two cannot be compared. Go back to what it was, or begin a new series "
            "in another --output."
        )
    # The requests must be the ones that the runs on disk were given.
    for stage, facts_of_stage in series.workload.items():
        path = output / "workload" / f"{stage}.jsonl"
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != facts_of_stage["sha256"]:
            raise SeriesError(
                f"--resume: {path} is not the file that was written when the series began. Begin a "
                "new one in another --output."
            )
    done = sum(run.is_complete for run in record.read_runs(output, series))
    say(f"resuming: {done} of {len(series.runs)} runs are complete")
    return series


def prepare(settings: Settings, runs: list[Run], folder: Path) -> dict[str, Any]:
    """Writes the requests of every stage, once for all runs; returns what they hold by stage."""
    data = dataset.read(Path(settings.dataset))
    builder = workload.Builder(
        settings, data.conversations, count=workload.tokenizer_of(settings.model)
    )
    stages = {stage.name: stage for run in runs for stage in run.stages}
    written = {
        name: workload.write(builder.stage(stage), folder / f"{name}.jsonl")
        for name, stage in stages.items()
    }
    for facts_of_stage in written.values():
        facts_of_stage["conversations"] = len(data.conversations)
        facts_of_stage["passed_over"] = sum(data.skipped.values())
    return written


def _run_all(
    runs: list[Run], settings: Settings, output: Path, found: list[Gpu], say: Say
) -> list[str]:
    """Runs what is missing; returns the names of the runs that failed."""
    left = TimeLeft(settings)
    done: dict[str, RunRecord] = {}
    for run in runs:
        folder = output / "runs" / run.name
        if (folder / "run.json").is_file():
            old = record.read_run(folder)
            if old.is_complete:
                done[run.name] = old
                _learn_from(left, old)
    waiting = [run for run in runs if run.name not in done]
    failed: list[str] = []
    for place, run in enumerate(waiting):
        folder = output / "runs" / run.name
        _set_aside(folder)
        rest = waiting[place:]
        label = f"[{runs.index(run) + 1}/{len(runs)} {run.name}]"
        say(f"{label} starting; about {in_words(left.seconds(rest))} left")
        phases = 0

        def learn(phase: str, seconds: float) -> None:
            nonlocal phases
            phases += 1
            left.learn(phase, seconds)

        def tell(text: str, label: str = label, rest: list[Run] = rest) -> None:
            through = {rest[0].name: phases}  # noqa: B023 - read while this run goes on
            say(f"{label} {text}; about {in_words(left.seconds(rest, done=through))} left")

        package = identity.package_hash()
        result = execute(
            run,
            Context(
                settings=settings,
                folder=folder,
                workload=output / "workload",
                gpus=found,
                say=tell,
                learn=learn,
            ),
        )
        result.package = package
        record.write_run(result, folder)
        if result.error is not None:
            failed.append(run.name)
            say(f"{label} FAILED: {result.error}")
            if result.log_tail:
                say("    " + result.log_tail.replace("\n", "\n    "))
            if settings.on_failure == "stop":
                say("stopping here (--on-failure continue goes on with the next run)")
                break
    return failed


def _learn_from(left: TimeLeft, run: RunRecord) -> None:
    left.learn("start", run.start_seconds)
    left.learn("stop", run.stop_seconds)
    for name, stage in run.stages.items():
        left.learn(name, stage.seconds)


def _set_aside(folder: Path) -> None:
    """Renames what an interrupted or failed run left, so that no file of it is taken for a new."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.discarded-{number}")).exists():
        number += 1
    folder.rename(aside)


def write_report(output: Path, say: Say) -> list[Path]:
    """The report of a series from its files, into ``output/report``."""
    from vllm_tagma.lab.report.serve_files import write_series_report

    written, verdict = write_series_report(output, output / "report")
    say(verdict)
    return written


def dry_run(settings: Settings, *, output: Path, say: Say) -> None:
    """Prints what is missing, every command, and an estimate of the time; starts nothing."""
    found = gpus() if settings.device == "cuda" else []
    runs = runs_of(settings)
    for problem in preflight.problems(settings, output=output, gpus=found):
        say(f"# would stop: {problem.what}")
        say(f"#     {problem.way_out}")
    for run in runs:
        folder = output.absolute() / "runs" / run.name
        variables = commands.own_variables(settings, run=run)
        say(f"# run {run.name}: {' '.join(f'{k}={v}' for k, v in variables.items())}")
        say(shlex.join(commands.server_command(settings, run=run, traces=folder / "traces")))
        for stage in run.stages:
            words = commands.client_command(
                settings,
                stage=stage,
                requests=output.absolute() / "workload" / f"{stage.name}.jsonl",
                result=folder / f"{stage.name}.json",
                num_requests=stage.num_requests,
            )
            say(shlex.join(words))
    say(f"# {len(runs)} runs, about {in_words(TimeLeft(settings).seconds(runs))} (an estimate)")


def in_words(seconds: float) -> str:
    """``in_words(7320)`` is ``"2 h 2 min"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
