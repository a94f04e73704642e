"""``tagma bench serve``: the sub-command. Its flags are the fields of ``Settings``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_tagma.errors import ConfigError, TagmaError
from vllm_tagma.lab.bench_serve.process import Interrupted, interruptible
from vllm_tagma.lab.bench_serve.serve_settings import (
    HELP,
    TYPES,
    Settings,
    flag_of,
    option_type,
    resolve,
)

_HELP = "\n\n".join(  # a line a paragraph: typer keeps the breaks inside one
    (
        "Paged against tagma, end to end: vLLM's server and client, one backend after the other.",
        "Servers alternate as ABBA; each is put through the same requests. A value comes from its "
        "flag, else from --config FILE.toml (keys are the flags' names), else from the profile. "
        "Exit status: 0 measured (whatever the verdict), 1 failed, 2 wrong options, 130 "
        "interrupted.",
        "Example: tagma bench serve --profile cpu-smoke --output smoke",
    )
)


def _serve(
    *, config: Path | None, output: Path | None, resume: bool, dry_run: bool, **flags: Any
) -> None:
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    try:
        with interruptible():
            _run(config=config, output=output, resume=resume, dry_run=dry_run, flags=given)
    except Interrupted as interrupted:
        _note(f"interrupted ({interrupted}); no process is left behind.")
        if output is not None and (output / "series.json").is_file():
            _note(f"Continue with: tagma bench serve --output {output} --resume")
        raise typer.Exit(128 + interrupted.number) from None
    except ConfigError as error:
        _note(str(error))
        raise typer.Exit(2) from None
    except TagmaError as error:
        _note(str(error))
        raise typer.Exit(1) from None


def _run(
    *, config: Path | None, output: Path | None, resume: bool, dry_run: bool, flags: dict[str, Any]
) -> None:
    from vllm_tagma.lab.bench_serve import record, series
    from vllm_tagma.lab.bench_serve.serve_settings import from_json

    if resume and config is None and not flags and output is not None:
        if not record.is_series(output):
            raise ConfigError(f"--resume: {output} holds no series (no series.json)")
        recorded = record.read_series(output)
        settings = from_json(recorded.settings, source=str(output / "series.json"))
    else:
        settings = _settings(flags, config)
    if output is None and not dry_run:
        raise ConfigError("--output DIR is missing: where the series is written")
    if dry_run:
        series.dry_run(settings, output=output or Path("OUTPUT"), say=typer.echo)
        return
    assert output is not None
    for path in series.measure(settings, output=output, resume=resume, say=_say):
        typer.echo(str(path))


def _settings(flags: dict[str, Any], config: Path | None) -> Settings:
    from vllm_tagma.lab.bench_serve.model import smoke_model
    from vllm_tagma.lab.bench_serve.profiles import PROFILES

    profiles = dict(PROFILES)
    profiles["cpu-smoke"] = {**PROFILES["cpu-smoke"], "model": smoke_model()}
    settings = resolve(flags=flags, config=config, profiles=profiles)
    if not settings.profile and config is None:
        raise ConfigError(
            f"choose a --profile ({', '.join(PROFILES)}) or give a --config FILE.toml"
        )
    return settings


def _say(text: str) -> None:
    # Unattended runs are read from a file: every line at once, none redrawn.
    print(text, flush=True)


def _note(text: str) -> None:
    print(f"tagma bench serve: {text}", file=sys.stderr, flush=True)


def _signature(function: Callable[..., None]) -> Callable[..., None]:
    """Gives ``function`` the flags of all settings, for typer to read."""
    own: dict[str, tuple[Any, Any]] = {
        "config": (
            Annotated[Path | None, typer.Option("--config", help="Settings from a TOML file.")],
            None,
        ),
        "output": (
            Annotated[
                Path | None, typer.Option("--output", "-o", help="Folder of the series; new.")
            ],
            None,
        ),
        "resume": (
            Annotated[
                bool, typer.Option("--resume", help="Continue the series in --output; alone, as is")
            ],
            False,
        ),
        "dry_run": (
            Annotated[
                bool, typer.Option("--dry-run", help="Print every command and what is missing.")
            ],
            False,
        ),
    }
    for name, text in HELP.items():
        flag = flag_of(name)
        switch = f"{flag}/--no-{flag.removeprefix('--')}" if TYPES[name] is bool else flag
        option = typer.Option(switch, help=text, show_default=False)
        own[name] = (Annotated[option_type(name), option], None)
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, (annotation, default) in own.items()
        ]
    )
    function.__annotations__ = {name: annotation for name, (annotation, _) in own.items()}
    return function


def register(app: typer.Typer) -> None:
    """Adds the sub-command ``serve`` to ``tagma bench``."""
    app.command(name="serve", help=_HELP)(_signature(_serve))
