"""The result file of ``tagma bench transfer``: its types, its version, reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import Struct, field

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench.statistics import Summary, ratios_of, summarise
from vllm_tagma.lab.json_file import FileKind


class TransferResultError(TagmaError, ValueError):
    """A file that is not a result of this benchmark, or of a version this release cannot read."""


class ArmKind(NamedTuple):
    """One combination: backend of both pools, method of ``Peers``, the same in words."""

    backend: str
    method: str
    words: str


ARMS: Final = {
    "stock": ArmKind("paged", "post_as_vllm", "vLLM's pools, vLLM's connector"),
    "connector": ArmKind("paged", "post_as_runs", "vLLM's pools, runs"),
    "pool": ArmKind("tagma", "post_as_vllm", "tagma's pools, vLLM's connector"),
    "both": ArmKind("tagma", "post_as_runs", "tagma's pools, runs"),
}
PARTS: Final = ("describe", "post", "transfer")
"""What is timed: describing a transfer to NIXL, posting it, and from there until it is done."""


class Arm(Struct, kw_only=True):
    """The transfers of one arm, in the order of their requests; ``blocks`` and pieces are sums.

    ``times_ms``: by part, a value for each transfer.
    """

    descriptors: list[int]
    times_ms: dict[str, list[float]]
    num_bytes: int
    blocks: int
    decode_ranges: int
    prefill_ranges: int
    larger_side_ranges: int
    joint_runs: int

    def mean(self, part: str) -> float:
        """Milliseconds a transfer."""
        return summarise(self.times_ms[part]).mean

    def posting(self) -> list[float]:
        """Milliseconds to describe and to post each transfer."""
        parts = zip(self.times_ms["describe"], self.times_ms["post"], strict=True)
        return [describe + post for describe, post in parts]


class Gather(Struct, kw_only=True):
    """What it would bring, and cost, to copy each sender's blocks into one range before they are
    sent, on tagma's pools; sums over the transfers.

    ``saved_runs``: joint runs less the ranges of the decode side. ``copied_blocks``: those outside
    the sender's longest range, and ``copy_ms`` is what copying them in every region took.
    """

    saved_runs: int
    copied_blocks: int
    copy_ms: float


class Stage(Struct, kw_only=True):
    """Transfers whose decode pool was fresh, or churned, by arm."""

    requests: int
    arms: dict[str, Arm]
    gather: Gather

    def ratio(self, what: str, over: str = "both") -> Summary:
        """Stock over another arm, transfer by transfer: ``posting`` or a part of ``PARTS``."""
        below, above = self.arms[over], self.arms["stock"]
        if what == "posting":
            return summarise(ratios_of(above.posting(), below.posting()))
        return summarise(ratios_of(above.times_ms[what], below.times_ms[what]))

    def descriptor_us(self) -> float | None:
        """Microseconds that one descriptor more costs, until its transfer is done: the difference
        of stock's pools and ours. ``None`` if they posted as many."""
        stock, both = self.arms["stock"], self.arms["both"]
        more = sum(stock.descriptors) - sum(both.descriptors)
        if more <= 0:
            return None
        times = (
            sum(sum(arm.times_ms[p]) for p in ("describe", "transfer")) for arm in (stock, both)
        )
        return 1e3 * (next(times) - next(times)) / more

    def descriptor_ratio(self) -> float:
        """All descriptors of stock over all of ours."""
        return sum(self.arms["stock"].descriptors) / sum(self.arms["both"].descriptors)


def gather_line(stage: Stage, *, regions: int) -> str:
    """What gathering would save and cost, a transfer, in words."""
    gather, count, each = stage.gather, stage.requests, stage.descriptor_us()
    saved = gather.saved_runs / count
    line = (
        f"Gathering the sender's blocks first would save {saved:.2f} of "
        f"{stage.arms['both'].joint_runs / count:.2f} runs a transfer and copy "
        f"{gather.copied_blocks / count:.0f} blocks in {regions} regions, "
        f"{gather.copy_ms / count:.3f} ms"
    )
    if each is None:
        return f"{line}."
    worth = each * saved * regions / 1e3
    return f"{line}; a descriptor costs {each:.1f} us, so it saves {worth:.3f} ms."


class ServerStage(Struct, kw_only=True):
    """Time to first token of one stage: by backend and quantity, milliseconds since the request's
    start; what its decode server transferred. Quantities: what the prefill server has when it is
    asked (``computed``: nothing, ``cached``: the prompt), and until when."""

    times_ms: dict[str, dict[str, list[float]]]
    transferred: dict[str, dict[str, float]]

    def ratio(self, kind: str) -> Summary:
        """Stock over ours, prompt by prompt."""
        stock, ours = (self.times_ms[backend][f"{kind}_token"] for backend in ("paged", "tagma"))
        return summarise(ratios_of(stock, ours))


class Servers(Struct, kw_only=True):
    """Two pairs of servers: blocks of each pool, tokens of a block, prompts of each stage, least
    and most tokens of a prompt."""

    blocks: int
    block_size: int
    prompts: int
    tokens: list[int]
    stages: dict[str, ServerStage]


class TransferResult(Struct, kw_only=True):
    """One run. ``pools``: of each backend's decode side, by name: mean live share, preemptions."""

    created: str
    command: str
    seconds: float
    trace: dict[str, Any]
    pool_blocks: int
    block_size: int
    max_num_seqs: int
    regions: int
    block_bytes: int
    pools: dict[str, dict[str, float]]
    stages: dict[str, Stage]
    environment: dict[str, Any]
    servers: Servers | None = field(default=None)


FILE: Final = FileKind(
    "tagma-bench-transfer",
    1,
    command="tagma bench transfer --json",
    schema=TransferResult,
    error=TransferResultError,
)


def is_result(path: Path) -> bool:
    """Whether a file says that it is one; a faulty one may."""
    try:
        head = path.read_bytes()[:200]
    except OSError:
        return False
    return FILE.kind.encode() in head
