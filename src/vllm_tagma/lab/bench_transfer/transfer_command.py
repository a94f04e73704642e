"""``tagma bench transfer``: options, the run, the table, the result file."""

from __future__ import annotations

import datetime
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.quiet_vllm import quiet_vllm

if TYPE_CHECKING:
    from vllm_tagma.lab.bench_transfer.transfer_pairs import PairedBlocks
    from vllm_tagma.lab.bench_transfer.transfer_posting import Peers, Posted

ARMS: Final = {
    "stock": ("paged", "post_as_vllm", "vLLM's pools, vLLM's connector"),
    "connector": ("paged", "post_as_runs", "vLLM's pools, runs"),
    "pool": ("tagma", "post_as_vllm", "tagma's pools, vLLM's connector"),
    "both": ("tagma", "post_as_runs", "tagma's pools, runs"),
}
"""Name -> backend of the pools, method of ``Peers``, the same in words."""

STAGES: Final = ("fresh", "churned")


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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """What posting a KV transfer costs between two pools that a trace has churned.

    The trace is replayed on a prefill and a decode pool, with vLLM's manager and with tagma's; then
    the same requests' transfers are posted through the real NIXL in this process, by turns, block
    by block as vLLM does and as runs. Needs the extra 'nixl'; no GPU and no model.

    Exit status: 0 measured, 1 failed, 2 wrong options or no usable trace.
    """
    quiet_vllm()
    os.environ.setdefault("UCX_TLS", "tcp,self,sm")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
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
        result = _measure(trace, limit, settings, block_bytes=block_bytes, samples=samples)
    except (TraceError, SettingsError) as error:
        typer.echo(f"tagma bench transfer: {error}", err=True)
        raise typer.Exit(2) from None
    except (TagmaError, OSError) as error:
        typer.echo(f"tagma bench transfer: {error}", err=True)
        raise typer.Exit(1) from None
    _print(result)
    if json_file is not None:
        write(result, json_file)
        typer.echo(f"{json_file} written")


def _measure(
    path: Path | None, limit: int | None, settings: Any, *, block_bytes: int, samples: int
) -> dict[str, Any]:
    from vllm_tagma import versions
    from vllm_tagma.lab.bench import environment
    from vllm_tagma.lab.bench_transfer.transfer_pairs import pair_blocks
    from vllm_tagma.lab.bench_transfer.transfer_posting import Peers
    from vllm_tagma.lab.replay import formats
    from vllm_tagma.lab.replay.replay_command import shipped_trace
    from vllm_tagma.lab.replay.replay_settings import pool_blocks

    found = shipped_trace(limit) if path is None else formats.read(path, limit=limit)
    num_blocks = pool_blocks(settings, found.requests)
    versions.require_supported_vllm()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # Before the replay, which takes minutes: NIXL may be missing.
    with Peers(regions=settings.regions, num_blocks=num_blocks, block_bytes=block_bytes) as peers:
        pools = {
            backend: pair_blocks(backend, found.requests, settings, num_blocks=num_blocks)
            for backend in ("paged", "tagma")
        }
        pairs = {name: {pair.request: pair for pair in pool.pairs} for name, pool in pools.items()}
        stages = {}
        for stage in STAGES:
            chosen = _sample(pairs, stage=stage, samples=samples)
            if chosen:
                stages[stage] = _post(peers, pairs, chosen, regions=settings.regions)
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["tagma", *sys.argv[1:]]),
        "trace": {"name": found.name, "requests": len(found.requests)},
        "pool_blocks": num_blocks,
        "block_size": settings.block_size,
        "max_num_seqs": settings.max_num_seqs,
        "regions": settings.regions,
        "block_bytes": block_bytes,
        "pools": {
            name: {"live_share": pool.live, "preemptions": pool.preemptions}
            for name, pool in pools.items()
        },
        "stages": stages,
        "environment": environment.capture(),
    }


def _sample(pairs: dict[str, dict[int, PairedBlocks]], *, stage: str, samples: int) -> list[int]:
    """Requests, evenly spread, that both backends transferred in this stage."""
    paged, tagma = pairs["paged"], pairs["tagma"]
    wanted = stage == "fresh"
    common = [
        index
        for index in sorted(paged.keys() & tagma.keys())
        if paged[index].fresh == tagma[index].fresh == wanted
    ]
    step = max(1, len(common) // samples)
    return common[::step][:samples]


def _post(
    peers: Peers, pairs: dict[str, dict[int, PairedBlocks]], chosen: list[int], *, regions: int
) -> dict[str, Any]:
    """Post every chosen request's transfer in each arm, by turns; sums and shapes of each arm."""
    posted: dict[str, list[Posted]] = {name: [] for name in ARMS}
    for turn, request in enumerate(chosen):
        names = list(ARMS)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            backend, method, _ = ARMS[name]
            pair = pairs[backend][request]
            # vLLM's connectors are given lists of ints, so both are here.
            local, remote = pair.local.tolist(), pair.remote.tolist()
            posted[name].append(getattr(peers, method)(local, remote))
    arms = {name: _summary(values) for name, values in posted.items()}
    for name, (backend, _, _) in ARMS.items():
        arms[name] |= _shape([pairs[backend][request] for request in chosen])
    for name in ("connector", "both"):
        expected = arms[name]["joint_runs"] * regions
        if arms[name]["descriptors"] != expected:
            raise TagmaError(
                f"{arms[name]['descriptors']} descriptors were posted, expected {expected}: "
                "joint runs x regions"
            )
    return {"requests": len(chosen), "arms": arms}


def _summary(values: list[Posted]) -> dict[str, Any]:
    import numpy as np

    counts = np.array([value.descriptors for value in values])
    return {
        "descriptors": int(counts.sum()),
        "descriptors_p99": float(np.quantile(counts, 0.99)),
        **{
            f"{part}_ms": {
                "sum": float(sum(getattr(value, f"{part}_ms") for value in values)),
                "median": float(np.median([getattr(value, f"{part}_ms") for value in values])),
            }
            for part in ("describe", "post", "transfer")
        },
        "bytes": sum(value.num_bytes for value in values),
    }


def _shape(pairs: list[PairedBlocks]) -> dict[str, Any]:
    """Blocks and pieces, summed over requests: of each side alone, and joint."""
    from vllm_tagma.lab.replay.views import count_ranges
    from vllm_tagma.transfer.joint_runs import joint_runs

    sides = [(count_ranges(pair.local), count_ranges(pair.remote)) for pair in pairs]
    return {
        "blocks": sum(len(pair.local) for pair in pairs),
        "decode_ranges": sum(local for local, _ in sides),
        "prefill_ranges": sum(remote for _, remote in sides),
        "larger_side_ranges": sum(max(pair) for pair in sides),
        "joint_runs": sum(joint_runs(pair.local, pair.remote).num_runs for pair in pairs),
    }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    live = ", ".join(
        f"{name} {pool['live_share']:.0%} live, {pool['preemptions']} preemptions"
        for name, pool in result["pools"].items()
    )
    console.print(
        f"{result['trace']['name']}: {result['trace']['requests']} requests; pools of "
        f"{result['pool_blocks']:,} blocks of {result['block_size']} tokens, decode side: {live}; "
        f"{result['regions']} regions, {result['block_bytes']} bytes a block"
    )
    for stage, content in result["stages"].items():
        requests = content["requests"]
        table = Table(title=f"{stage} decode pool: {requests} transfers, means of one; times in ms")
        for column in ("", "blocks", "runs", "descriptors", "p99", "describe", "post", "till done"):
            table.add_column(column, justify="left" if not column else "right")
        for name, arm in content["arms"].items():
            table.add_row(
                name,
                f"{arm['blocks'] / requests:,.0f}",
                f"{arm['joint_runs'] / requests:,.2f}",
                f"{arm['descriptors'] / requests:,.0f}",
                f"{arm['descriptors_p99']:,.0f}",
                *(
                    f"{arm[f'{part}_ms']['sum'] / requests:,.2f}"
                    for part in ("describe", "post", "transfer")
                ),
            )
        console.print(table)
        stock, both = content["arms"]["stock"], content["arms"]["both"]
        till_done = stock["transfer_ms"]["sum"] / both["transfer_ms"]["sum"]
        console.print(
            f"stock / both: descriptors {stock['descriptors'] / both['descriptors']:.1f}, describe "
            f"and post {_posting(stock) / _posting(both):.1f}, till done {till_done:.1f}; "
            f"both: runs / ranges of the larger side "
            f"{both['joint_runs'] / both['larger_side_ranges']:.2f}"
        )
    for name, (_, _, words) in ARMS.items():
        console.print(f"{name}: {words}")


def _posting(arm: dict[str, Any]) -> float:
    return float(arm["describe_ms"]["sum"] + arm["post_ms"]["sum"])
