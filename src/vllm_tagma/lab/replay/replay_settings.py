"""The conditions of a replay: one value for both backends, written into the result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.replay.trace import TraceRequest

MAX_BLOCKS = 10_000_000
"""vLLM's own manager keeps a Python object a block; ten million take 3 GB."""

Arrivals = Literal["closed", "trace"]
MaxTokens = Literal["open", "known"]


class SettingsError(TagmaError, ValueError):
    """An option whose value makes no sense, or not together with the trace."""


class Footprint(NamedTuple):
    """How many blocks requests hold: per KV-cache group the most of a request, None for as many as
    it has tokens."""

    limits: tuple[int | None, ...] = (None,)

    def blocks(self, request: TraceRequest, block_size: int) -> int:
        """Blocks of a request, when it ends, in all groups."""
        whole = request.num_blocks(block_size)
        return sum(whole if limit is None else min(whole, limit) for limit in self.limits)


ONE_ROW = Footprint()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes in blocks and tokens, as vLLM's options of the same names."""

    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    watermark: float = 0.02
    memory: str = "1.5x"
    """Blocks of the pool, or a multiple of the running set, ``max_num_seqs`` mean requests."""
    arrivals: Arrivals = "closed"
    speed: float = 1.0
    step_ms: float = 8.0
    token_us: float = 30.0
    max_tokens: MaxTokens = "open"
    """What vLLM is told of a request's output: nothing but the trace's own limit, or its length."""
    regions: int = 64
    """Stretches of memory that hold a block's KV; 0: keys and values of its group's layers."""
    model: str | None = None
    """Where the KV-cache groups come from; None: one group, full attention in 32 layers."""
    compaction: str | None = None
    copy_budget: int | None = None

    def __post_init__(self) -> None:
        """Raises :class:`SettingsError` for values that vLLM refuses only after a while."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than "
                f"--max-num-seqs {self.max_num_seqs}: a step could not give every request a token"
            )

    def tagma_options(self) -> dict[str, object]:
        """What goes under ``additional_config["tagma"]``."""
        given = {"compaction": self.compaction, "copy_budget": self.copy_budget}
        return {name: value for name, value in given.items() if value is not None}

    def step_seconds(self, num_tokens: int) -> float:
        """Time of a step that computes ``num_tokens`` tokens, by the documented model."""
        return self.step_ms / 1e3 + self.token_us / 1e6 * num_tokens


def pool_blocks(
    settings: Settings, requests: Sequence[TraceRequest], footprint: Footprint = ONE_ROW
) -> int:
    """Blocks of the pool that ``settings.memory`` asks for, the null block included.

    Raises:
        SettingsError: ``memory`` is neither a number of blocks nor a multiple such as ``2x``.
    """
    text = settings.memory.strip().lower()
    if re.fullmatch(r"\d+", text):
        blocks = int(text)
    elif re.fullmatch(r"(\d+\.?\d*|\.\d+)x", text):
        footprints = [footprint.blocks(request, settings.block_size) for request in requests]
        running_set = settings.max_num_seqs * sum(footprints) / len(footprints)
        blocks = int(float(text[:-1]) * running_set)
    else:
        raise SettingsError(
            f"--memory {settings.memory} is neither a number of blocks nor a multiple of the "
            f"running set. Examples: --memory 65536, --memory 1.5x"
        )
    if blocks > MAX_BLOCKS:
        raise SettingsError(
            f"--memory {settings.memory} gives a pool of {blocks:,} blocks, more than the "
            f"{MAX_BLOCKS:,} that a replay can hold. Give less."
        )
    if blocks < 2:
        raise SettingsError(
            f"--memory {settings.memory} gives a pool of {blocks} blocks, and vLLM keeps one as "
            f"its null block. Give more."
        )
    return blocks
