"""The ``tagma`` command: parses and prints, nothing else; one module per sub-command.

Imports stay light: ``tagma --version`` must not load torch or vLLM. ``doctor`` is part of the
product and works without the laboratory, whose sub-commands are loaded when one of them, or the
list of all, is asked for.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vllm_tagma import versions


def _laboratory() -> TyperGroup:
    from vllm_tagma.lab.lab_commands import group

    return group()


class _WithLaboratory(TyperGroup):
    """The commands below, and behind them those of the laboratory."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_laboratory().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or _laboratory().get_command(ctx, cmd_name)


app = typer.Typer(
    name="tagma",
    cls=_WithLaboratory,
    help="Range-addressed KV-cache blocks for vLLM.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-tagma {versions.tagma_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Range-addressed KV-cache blocks for vLLM."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Model folder or hub id to check; vLLM flags follow '--'.")
    ] = None,
) -> None:
    """Show what is installed, which seams of vLLM fit, what MODEL would be refused for, which flags
    suit this machine.

    Exit status: 0 healthy, 1 problems. Example: tagma doctor ./model -- --max-model-len 4096
    """
    from vllm_tagma import doctor as command

    if model is not None and model.startswith("-"):
        raise typer.BadParameter(f"name a model before the vLLM flags (got {model!r})")
    raise typer.Exit(command.run(model=model, vllm_flags=context.args))


def main() -> None:
    """Entry point of the console script."""
    app()
