"""The sub-commands of the laboratory, joined for ``vllm_tagma.cli``. Light: no torch, no vLLM."""

from __future__ import annotations

from functools import cache

import typer
from typer.core import TyperGroup

from vllm_tagma.lab.bench.bench_command import app as bench_app
from vllm_tagma.lab.pool_map.map_command import pool_map
from vllm_tagma.lab.replay.replay_command import replay
from vllm_tagma.lab.report.report_command import report

_app = typer.Typer()
_app.add_typer(bench_app)
_app.command(name="map")(pool_map)
_app.command()(replay)
_app.command()(report)


@cache
def group() -> TyperGroup:
    """``bench``, ``map``, ``replay`` and ``report`` as one group of commands."""
    return typer.main.get_group(_app)
