"""One run of ``tagma bench transfer``: servers, replay, posting, in this order."""

from __future__ import annotations

import datetime
import logging
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_tagma import versions
from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench import environment
from vllm_tagma.lab.bench_transfer.transfer_first_token import measure
from vllm_tagma.lab.bench_transfer.transfer_pairs import PairedBlocks, pair_blocks
from vllm_tagma.lab.bench_transfer.transfer_posting import Peers, Posted, require_nixl
from vllm_tagma.lab.bench_transfer.transfer_result import (
    ARMS,
    PARTS,
    Arm,
    Gather,
    Servers,
    Stage,
    TransferResult,
)
from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.replay_command import shipped_trace
from vllm_tagma.lab.replay.replay_settings import Settings, pool_blocks
from vllm_tagma.lab.replay.views import count_ranges
from vllm_tagma.transfer.joint_runs import Ids, joint_runs

STAGES = ("fresh", "churned")

PairsOf = dict[str, dict[int, PairedBlocks]]


def run(
    path: Path | None,
    limit: int | None,
    settings: Settings,
    *,
    block_bytes: int,
    samples: int,
    prompts: int,
    say: Callable[[str], None],
) -> TransferResult:
    """Measure. ``path``: the trace; None for the one that ships here.

    Raises:
        TraceError, SettingsError: no usable trace, or options that do not fit it.
        TagmaError: NIXL is missing, or a transfer did not do what it should.
    """
    begin = time.monotonic()
    found = shipped_trace(limit) if path is None else formats.read(path, limit=limit)
    num_blocks = pool_blocks(settings, found.requests)
    versions.require_supported_vllm()
    require_nixl()  # before what takes minutes
    logging.getLogger("vllm").setLevel(logging.ERROR)
    servers = None
    if prompts:  # before NIXL's threads are here: processes are started
        figures = measure(
            prompts=prompts,
            regions=settings.regions,
            seed=1,
            say=say,
        )
        servers = msgspec.convert(figures, Servers)
    say(f"replaying {len(found.requests)} requests on both backends")
    pools = {
        backend: pair_blocks(backend, found.requests, settings, num_blocks=num_blocks)
        for backend in ("paged", "tagma")
    }
    pairs = {name: {pair.request: pair for pair in pool.pairs} for name, pool in pools.items()}
    stages = {}
    with Peers(regions=settings.regions, num_blocks=num_blocks, block_bytes=block_bytes) as peers:
        for stage in STAGES:
            chosen = _sample(pairs, stage=stage, samples=samples)
            if chosen:
                say(f"posting {len(chosen)} transfers, {stage} pool")
                stages[stage] = _post(peers, pairs, chosen, regions=settings.regions)
    return TransferResult(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["tagma", *sys.argv[1:]]),
        seconds=round(time.monotonic() - begin, 1),
        trace={"name": found.name, "requests": len(found.requests)},
        pool_blocks=num_blocks,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        regions=settings.regions,
        block_bytes=block_bytes,
        pools={
            name: {"live_share": pool.live, "preemptions": pool.preemptions}
            for name, pool in pools.items()
        },
        stages=stages,
        servers=servers,
        environment=environment.capture(),
    )


def _sample(pairs: PairsOf, *, stage: str, samples: int) -> list[int]:
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


def _post(peers: Peers, pairs: PairsOf, chosen: list[int], *, regions: int) -> Stage:
    """Post every chosen request's transfer in each arm, by turns."""
    posted: dict[str, list[Posted]] = {name: [] for name in ARMS}
    for turn, request in enumerate(chosen):
        names = list(ARMS)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            pair = pairs[ARMS[name].backend][request]
            # vLLM's connectors are given lists of ints, so both are here.
            local, remote = pair.local.tolist(), pair.remote.tolist()
            posted[name].append(getattr(peers, ARMS[name].method)(local, remote))
    arms = {
        name: _arm(values, [pairs[ARMS[name].backend][request] for request in chosen])
        for name, values in posted.items()
    }
    for name in ("connector", "both"):
        found, expected = sum(arms[name].descriptors), arms[name].joint_runs * regions
        if found != expected:
            raise TagmaError(
                f"{found} descriptors were posted, expected {expected}: joint runs x regions"
            )
    tagma = [pairs["tagma"][request] for request in chosen]
    return Stage(requests=len(chosen), arms=arms, gather=_gather(peers, tagma))


def _gather(peers: Peers, pairs: list[PairedBlocks]) -> Gather:
    """Copy what a sender would have to copy, for its blocks to be one range."""
    loose = [outside_longest_range(pair.remote) for pair in pairs]
    saved = sum(
        joint_runs(pair.local, pair.remote).num_runs - count_ranges(pair.local) for pair in pairs
    )
    return Gather(
        saved_runs=saved,
        copied_blocks=sum(map(len, loose)),
        copy_ms=sum(peers.copy_ms(blocks) for blocks in loose),
    )


def outside_longest_range(blocks: Ids) -> Ids:
    """The blocks of a row that are not in its longest range (the first of several)."""
    edges = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = np.concatenate(([0], edges))
    ends = np.concatenate((edges, [len(blocks)]))
    longest = int(np.argmax(ends - starts))
    return np.delete(blocks, np.s_[starts[longest] : ends[longest]])


def _arm(values: list[Posted], pairs: list[PairedBlocks]) -> Arm:
    """Figures of the transfers, and blocks and pieces: of each side alone, and joint."""
    sides: Any = np.array([(count_ranges(p.local), count_ranges(p.remote)) for p in pairs])
    return Arm(
        descriptors=[value.descriptors for value in values],
        times_ms={part: [getattr(value, f"{part}_ms") for value in values] for part in PARTS},
        num_bytes=sum(value.num_bytes for value in values),
        blocks=sum(len(pair.local) for pair in pairs),
        decode_ranges=int(sides[:, 0].sum()),
        prefill_ranges=int(sides[:, 1].sum()),
        larger_side_ranges=int(sides.max(axis=1).sum()),
        joint_runs=sum(joint_runs(pair.local, pair.remote).num_runs for pair in pairs),
    )
