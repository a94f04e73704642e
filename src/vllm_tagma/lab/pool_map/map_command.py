"""``tagma map``: the sub-command."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_tagma.errors import TagmaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_tagma.lab.pool_map.map_source import EnginePool


def pool_map(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the server.")
    ] = "http://localhost:8000",
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.1, help="Draw again and again, until Ctrl-C."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Draw once; the default.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one line of JSON instead.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_API_KEY",
            show_envvar=True,
            help="Sent as bearer token. vLLM itself leaves /metrics open.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Wait so long for an answer.")
    ] = 10.0,
) -> None:
    """Show the KV-cache pool of a running server, from its /metrics.

    One row of cells for each engine, by address: blocks of requests, idle cached blocks, holes; and
    the key figures. With --watch a second row marks where blocks came (+) and went (-), and a line
    says what changed: ranges, moves, pins, transfers. Exit status: 0 shown, 1 not. Example:
    tagma map localhost:8000 --watch 1
    """
    if once and watch is not None:
        raise typer.BadParameter("--once and --watch exclude each other")

    def pools() -> list[EnginePool]:
        from vllm_tagma.lab.pool_map import map_source

        text = map_source.fetch(url, api_key=api_key, timeout=timeout)
        return map_source.read_pools(text, address=map_source.metrics_url(url))

    try:
        _show(pools, url=url, watch=watch, as_json=as_json)
    except TagmaError as error:
        typer.echo(f"tagma map: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _show(
    pools: Callable[[], list[EnginePool]], *, url: str, watch: float | None, as_json: bool
) -> None:
    """Print what ``pools`` returns, once or every ``watch`` seconds until it raises."""
    from rich.console import Console
    from rich.live import Live

    from vllm_tagma.lab.pool_map.map_drawing import draw

    console = Console(highlight=False)
    if as_json:
        _print_json(url, pools())
        while watch is not None:
            time.sleep(watch)
            _print_json(url, pools())
        return
    seen = pools()
    if watch is None:
        console.print(draw(seen, console))
    elif console.is_terminal:
        with Live(draw(seen, console), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(watch)
                before, seen = seen, pools()
                live.update(draw(seen, console, before=before), refresh=True)
    else:
        console.print(draw(seen, console))
        while True:
            time.sleep(watch)
            before, seen = seen, pools()
            console.print(draw(seen, console, before=before))


def _print_json(url: str, pools: list[EnginePool]) -> None:
    engines = [
        {**dataclasses.asdict(pool), "blocks": pool.blocks, "mean_ranges": pool.mean_ranges}
        for pool in pools
    ]
    # Flushed: a reader at the other end of a pipe watches line by line.
    print(json.dumps({"url": url, "time": time.time(), "engines": engines}), flush=True)
