"""How many blocks a scheduler step may have copied: a bound in blocks and one in bytes.

A block is 8 KiB in one model and 3 MiB in another, and what a step can copy without being felt is
bytes: what the device copies in a fifth of a step. So ``copy_bytes`` is derived from the device
unless it is given, and divided by what a block takes in all layers; ``copy_budget`` bounds the
blocks whatever their size.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

STEP_SHARE: Final = 0.2
STEP_SECONDS: Final = {"cuda": 0.05, "cpu": 0.25}
"""A step that decodes a full batch takes about as long, on a GPU and on a CPU: inter-token
latencies that services promise and that CPUs reach."""

AUTO: Final = "auto"
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class CopyRate(NamedTuple):
    """Bytes a second that a device copies (each is read and written), and how that is known."""

    device: str  # "cuda" or "cpu"
    bytes_per_second: float
    known_from: str


class CopyBudget(NamedTuple):
    """Blocks a step, and the bound that decided it, in words."""

    blocks: int
    why: str


def bytes_of(size: str) -> int | None:
    """Bytes that an option names: ``"512M"``; None for ``"auto"``.

    Raises:
        ValueError: neither that nor a whole number with K, M, G or T (powers of 1,024) behind it.
    """
    if size == AUTO:
        return None
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"{size!r} is neither {AUTO} nor a size such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2]]


def copy_budget_of(
    *, copy_budget: int, copy_bytes: str, block_bytes: int, rate: CopyRate | None
) -> CopyBudget:
    """The budget of a pool whose blocks take ``block_bytes`` in all layers of a device.

    ``rate``: of the device, None if unknown; it matters for ``copy_bytes="auto"`` alone. At least
    one block, unless an option says 0. 0 ``block_bytes`` (a made-up cache) leaves the blocks.
    """
    given = bytes_of(copy_bytes)
    if copy_budget == 0 or block_bytes == 0:
        return CopyBudget(copy_budget, "copy_budget")
    if given is not None:
        most, why = given, f"copy_bytes {copy_bytes}"
        blocks = most // block_bytes
    elif rate is None:
        return CopyBudget(copy_budget, "copy_budget; how fast this device copies is not known")
    else:
        seconds = STEP_SHARE * STEP_SECONDS[rate.device]
        most = int(seconds * rate.bytes_per_second)
        blocks = max(most // block_bytes, 1)
        why = f"{in_words(most)}, {seconds * 1000:.0f} ms at {in_words(rate.bytes_per_second)}/s"
        why = f"{why} {rate.known_from}"
    return (
        CopyBudget(blocks, why) if blocks < copy_budget else CopyBudget(copy_budget, "copy_budget")
    )


def in_words(num_bytes: float) -> str:
    """``"1.5 GiB"``."""
    for unit, text in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {text}"
    return f"{num_bytes:.0f} B"
