"""What the report of ``tagma bench transfer`` says: from a result to a document."""

from __future__ import annotations

from typing import Final

import numpy as np

from vllm_tagma.lab.bench.statistics import Summary, summarise
from vllm_tagma.lab.bench_transfer.transfer_result import (
    ARMS,
    PARTS,
    Servers,
    ServerStage,
    Stage,
    TransferResult,
    gather_line,
)
from vllm_tagma.lab.report import prose
from vllm_tagma.lab.report.charts import Bar, Row, bar_chart
from vllm_tagma.lab.report.document import Bullets, Document, Figure, Section, Table

Block = str | Table | Figure | Bullets

_PART_WORDS: Final = {
    "describe": "describe",
    "post": "post",
    "transfer": "until done, from the post on",
}
_KIND_WORDS: Final = {
    "computed": "the prefill server computes the prompt",
    "cached": "the prefill server has the prompt in its cache",
}
_METHOD: Final = (
    "A trace is replayed on a prefill pool and a decode pool, with vLLM's scheduler and no model: "
    "once on vLLM's manager, once on tagma's. For each request the blocks are noted that a "
    "transfer would pair; what the decoder has in its prefix cache is left out. Then the same "
    "requests' transfers are posted between two NIXL agents in one process, in each combination of "
    "pools and connector, by turns. A decode pool is fresh until it evicts its first block.",
    "A ratio is taken for each request, stock over ours, and the median of those is shown with the "
    "10th and 90th percentiles.",
)
_SERVERS_METHOD: Final = (
    "Four servers run, a prefill and a decode server of each kind: stock (vLLM's manager, "
    "NixlConnector) and ours (tagma, TagmaNixlConnector). A prompt goes to one pair and then to "
    "the other, the order changes with each prompt. The clock starts before the request to the "
    "prefill server and stops at the decode server's first token, on both. Pools are churned by "
    "requests of mixed lengths on both sides, many at once; nothing else runs while a prompt is "
    "timed."
)
_NOT_SHOWN: Final = (
    "Everything is on one machine, over TCP and shared memory, in main memory. Over RDMA a "
    "descriptor costs less, and many of them still cost more than few.",
    "Blocks are small, so that memory for many regions fits: the work for each descriptor is that "
    "of a real pool, the time for its bytes is not.",
    "The model of the servers has random weights and is tiny: a real one computes longer, so that "
    "the transfer is a smaller share of the time to first token.",
)


def build(result: TransferResult) -> Document:
    """The report of one result."""
    versions = result.environment.get("versions", {})
    machine = result.environment.get("machine", {})
    sections = [
        _summary(result),
        *(_stage(name, stage, result) for name, stage in result.stages.items()),
        *_servers(result),
        _method(result),
        _machine(result),
        Section(title="What is not shown", blocks=[Bullets(items=_not_shown(result))]),
    ]
    return Document(
        title="vllm-tagma: what a KV transfer costs",
        subtitle=(
            f"vllm-tagma {versions.get('vllm_tagma')} against the NIXL connector of vLLM "
            f"{versions.get('vllm')}, measured {result.created} on {machine.get('cpu')} in "
            f"{result.seconds:.0f} s."
        ),
        sections=sections,
    )


def _summary(result: TransferResult) -> Section:
    rows = []
    for name, stage in result.stages.items():
        both = stage.arms["both"]
        rows += [
            [f"{name}: descriptors, stock over ours", f"{stage.descriptor_ratio():.1f}", ""],
            [
                f"{name}: runs over ranges of the side that has more",
                f"{both.joint_runs / both.larger_side_ranges:.2f}",
                "",
            ],
            [f"{name}: describe and post, stock over ours", *_ratio(stage.ratio("posting"))],
            [f"{name}: until done, stock over ours", *_ratio(stage.ratio("transfer"))],
        ]
    for name, servers in result.servers.stages.items() if result.servers else ():
        rows += [
            [f"{name}: time to first token, {words}", *_ratio(servers.ratio(kind))]
            for kind, words in _KIND_WORDS.items()
        ]
    table = Table(columns=["Quantity", "Median", "p10..p90"], rows=rows, numeric=frozenset({1, 2}))
    return Section(title="In short", blocks=[_pools(result), table])


def _pools(result: TransferResult) -> str:
    live = ", ".join(
        f"{name} {pool['live_share']:.0%} live with {pool['preemptions']:.0f} preemptions"
        for name, pool in result.pools.items()
    )
    return (
        f"{result.trace['name']}, {result.trace['requests']} requests; pools of "
        f"{result.pool_blocks:,} blocks of {result.block_size} tokens. Decode side: {live}."
    )


def _stage(name: str, stage: Stage, result: TransferResult) -> Section:
    count = stage.requests
    rows = []
    for label, arm in stage.arms.items():
        rows.append(
            [
                ARMS[label].words,
                f"{arm.joint_runs / count:.2f}",
                f"{sum(arm.descriptors) / count:,.0f}",
                f"{np.quantile(arm.descriptors, 0.99):,.0f}",
                *(_milliseconds(arm.times_ms[part]) for part in PARTS),
            ]
        )
    parts = [f"{_PART_WORDS[part]}, ms" for part in PARTS]
    table = Table(
        columns=["", "Runs", "Descriptors", "p99", *parts],
        rows=rows,
        numeric=frozenset(range(1, 7)),
    )
    chart = bar_chart(
        [
            Row(arm.words, [_bar(stage.arms[label].posting()), _bar(_till_done(stage, label))])
            for label, arm in ARMS.items()
        ],
        series=["describe and post", "until done"],
        axis="ms for a transfer, log scale",
        log=True,
    )
    blocks = stage.arms["both"].blocks / count
    return Section(
        title=f"Transfers, {name} decode pool",
        blocks=[
            f"{count} transfers of {blocks:,.0f} blocks and {result.regions} regions. Runs and "
            "descriptors: means of a transfer; times: median (10th to 90th percentile).",
            table,
            Figure(
                name=f"transfers-{name}",
                svg=chart,
                alt=f"Bar chart: milliseconds to post a transfer and until it is done, {name}",
                caption="Medians; whiskers from the 10th to the 90th percentile of the transfers.",
            ),
            gather_line(stage, regions=result.regions),
        ],
    )


def _till_done(stage: Stage, label: str) -> list[float]:
    times = stage.arms[label].times_ms
    return [a + b for a, b in zip(times["describe"], times["transfer"], strict=True)]


def _servers(result: TransferResult) -> list[Section]:
    if result.servers is None:
        return []
    blocks: list[Block] = [_SERVERS_METHOD, _server_line(result.servers)]
    for name, stage in result.servers.stages.items():
        blocks += [f"{name.capitalize()} pools:", _server_table(stage), _server_figure(name, stage)]
    return [Section(title="Time to first token", blocks=blocks)]


def _server_line(servers: Servers) -> str:
    least, most = servers.tokens
    return (
        f"{servers.prompts} prompts of {least:,} to {most:,} tokens a stage, pools of "
        f"{servers.blocks:,} blocks of {servers.block_size} tokens."
    )


def _server_table(stage: ServerStage) -> Table:
    stock, ours = stage.times_ms["paged"], stage.times_ms["tagma"]
    rows = [
        [
            f"first token, ms: {words}",
            _milliseconds(stock[f"{kind}_token"]),
            _milliseconds(ours[f"{kind}_token"]),
            " ".join(_ratio(stage.ratio(kind))),
        ]
        for kind, words in _KIND_WORDS.items()
    ]
    one, other = stage.transferred["paged"], stage.transferred["tagma"]
    for label, key, factor in (
        ("descriptors a transfer", "descriptors", 1),
        ("post, ms a transfer (vLLM's metric)", "post_seconds", 1000),
        ("transfer, ms a transfer (vLLM's metric)", "transfer_seconds", 1000),
    ):
        means = [factor * moved[key] / moved["transfers"] for moved in (one, other)]
        ratio = f"{means[0] / means[1]:.2f}" if means[1] else ""
        rows.append([label, f"{means[0]:,.2f}", f"{means[1]:,.2f}", ratio])
    return Table(
        columns=["", "stock", "ours", "stock / ours"], rows=rows, numeric=frozenset({1, 2, 3})
    )


def _server_figure(name: str, stage: ServerStage) -> Figure:
    rows = [
        Row(words, [_bar(stage.times_ms[backend][f"{kind}_token"]) for backend in _BACKENDS])
        for kind, words in _KIND_WORDS.items()
    ]
    chart = bar_chart(
        rows, series=["stock", "ours"], axis="ms to the first token, log scale", log=True
    )
    return Figure(
        name=f"first-token-{name}",
        svg=chart,
        alt=f"Bar chart: milliseconds to the first token of the decode server, {name} pools",
        caption="Medians; whiskers from the 10th to the 90th percentile of the prompts.",
    )


_BACKENDS: Final = ("paged", "tagma")


def _method(result: TransferResult) -> Section:
    return Section(
        title="Method",
        blocks=[
            *_METHOD,
            f"Here: {result.regions} regions of {result.block_bytes} bytes a block, at most "
            f"{result.max_num_seqs} requests at once.",
        ],
    )


def _machine(result: TransferResult) -> Section:
    rows = [[key, prose.readable(value)] for key, value in prose.leaves(result.environment)]
    rows.append(["command", result.command])
    return Section(
        title="Machine, versions, commit", blocks=[Table(columns=["What", "Value"], rows=rows)]
    )


def _not_shown(result: TransferResult) -> list[str]:
    found = list(_NOT_SHOWN)
    if result.servers is None:
        found.append("Not measured in this run: time to first token (--prompts).")
    machine = result.environment.get("machine", {})
    load, cpus = (machine.get("load_average") or [0.0])[0], machine.get("cpus_online") or 1
    if load > cpus:
        found.append(
            f"The machine was busy at the end: load {load} on {cpus} CPUs. Counts are exact, "
            "times are coarse."
        )
    return found


def _milliseconds(values: list[float]) -> str:
    found = summarise(values)
    return f"{found.median:,.2f} ({found.p10:,.2f} to {found.p90:,.2f})"


def _ratio(ratio: Summary) -> list[str]:
    return [f"{ratio.median:.2f}", f"{ratio.p10:.2f}..{ratio.p90:.2f}"]


def _bar(values: list[float]) -> Bar:
    found = summarise(values)
    return Bar(found.median, found.p10, found.p90, f"{found.median:,.2f} ms")
