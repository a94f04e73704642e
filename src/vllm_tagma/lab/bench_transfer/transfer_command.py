"""``tagma bench transfer``: options, the run, the table, the result file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.quiet_vllm import quiet_vllm

if TYPE_CHECKING:
    from vllm_tagma.lab.bench.statistics import Summary
    from vllm_tagma.lab.bench_transfer.transfer_result import TransferResult


def register(app: typer.Typer) -> None:
    """Add the sub-command to ``tagma bench``."""
    app.command()(transfer)


def transfer(
    trace: Annotated[
        Path | None, typer.Argument(help="Trace file (default: the small one that ships here).")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Requests to replay.")] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="Blocks of each pool, or a multiple of the running set.")
    ] = "1.33x",
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block.")] = 16,
    max_num_seqs: Annotated[
        int | None,
        typer.Option("--max-num-seqs", min=1, help="Requests that run at once (64; shipped 16)."),
    ] = None,
    regions: Annotated[
        int, typer.Option("--regions", min=1, help="Regions of memory: layers, as NIXL has them.")
    ] = 32,
    block_bytes: Annotated[
        int, typer.Option("--block-bytes", min=8, help="Bytes of a block in a region.")
    ] = 1024,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Transfers that are posted, of each stage.")
    ] = 60,
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts", min=0, help="Prompts to servers, for the time to first token (0: none)."
        ),
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result here, for 'tagma report'.")
    ] = None,
) -> None:
    """What posting a KV transfer costs between two pools that a trace has churned.

    The trace is replayed on a prefill and a decode pool, with vLLM's manager and with tagma's; then
    the same requests' transfers are posted through the real NIXL in this process, by turns, block
    by block as vLLM does and as runs. With --prompts, four servers (prefill and decode, stock and
    ours) are started on the CPU before, and the time to first token of the same prompts is taken
    by turns. Needs the extra 'nixl'; no GPU and no model.

    Exit status: 0 measured, 1 failed, 2 wrong options or no usable trace.
    """
    quiet_vllm()
    os.environ.setdefault("UCX_TLS", "tcp,self,sm")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    from vllm_tagma.lab.bench_transfer.transfer_result import FILE
    from vllm_tagma.lab.bench_transfer.transfer_run import run
    from vllm_tagma.lab.json_file import write
    from vllm_tagma.lab.replay.replay_command import SHIPPED_SEQS, TRACE_SEQS
    from vllm_tagma.lab.replay.replay_settings import Settings, SettingsError
    from vllm_tagma.lab.replay.trace import TraceError

    try:
        settings = Settings(
            block_size=block_size,
            max_num_seqs=max_num_seqs or (TRACE_SEQS if trace else SHIPPED_SEQS),
            memory=memory,
            regions=regions,
        )
        result = run(
            trace,
            limit,
            settings,
            block_bytes=block_bytes,
            samples=samples,
            prompts=prompts,
            say=lambda line: typer.echo(line, err=True),
        )
    except (TraceError, SettingsError) as error:
        typer.echo(f"tagma bench transfer: {error}", err=True)
        raise typer.Exit(2) from None
    except (TagmaError, OSError) as error:
        typer.echo(f"tagma bench transfer: {error}", err=True)
        raise typer.Exit(1) from None
    _print(result)
    if json_file is not None:
        write(FILE.document(result), json_file)
        typer.echo(f"{json_file} written")


def _print(result: TransferResult) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from vllm_tagma.lab.bench_transfer.transfer_result import ARMS, PARTS, gather_line

    console = Console()
    live = ", ".join(
        f"{name} {pool['live_share']:.0%} live, {pool['preemptions']:.0f} preemptions"
        for name, pool in result.pools.items()
    )
    console.print(
        f"{result.trace['name']}: {result.trace['requests']} requests; pools of "
        f"{result.pool_blocks:,} blocks of {result.block_size} tokens, decode side: {live}; "
        f"{result.regions} regions, {result.block_bytes} bytes a block"
    )
    for name, stage in result.stages.items():
        count = stage.requests
        table = Table(title=f"{name} decode pool: {count} transfers, means of one; times in ms")
        for column in ("", "blocks", "runs", "descriptors", "p99", "describe", "post", "till done"):
            table.add_column(column, justify="left" if not column else "right")
        for label, arm in stage.arms.items():
            table.add_row(
                label,
                f"{arm.blocks / count:,.0f}",
                f"{arm.joint_runs / count:,.2f}",
                f"{sum(arm.descriptors) / count:,.0f}",
                f"{np.quantile(arm.descriptors, 0.99):,.0f}",
                *(f"{arm.mean(part):,.2f}" for part in PARTS),
            )
        console.print(table)
        both = stage.arms["both"]
        console.print(
            f"stock / both: descriptors {stage.descriptor_ratio():.1f}, describe and post "
            f"{_spread(stage.ratio('posting'))}, till done {_spread(stage.ratio('transfer'))}; "
            f"both: runs / ranges of the larger side "
            f"{both.joint_runs / both.larger_side_ranges:.2f}"
        )
        console.print(gather_line(stage, regions=result.regions))
    for name, kind in ARMS.items():
        console.print(f"{name}: {kind.words}")
    if result.servers is not None:
        for name, servers in result.servers.stages.items():
            console.print(
                f"time to first token, {name} pools, stock / ours: "
                + ", ".join(
                    f"prompt {kind} by the prefill server {_spread(servers.ratio(kind))}"
                    for kind in ("computed", "cached")
                )
            )


def _spread(ratio: Summary) -> str:
    return f"{ratio.median:.2f} ({ratio.p10:.2f} to {ratio.p90:.2f})"
