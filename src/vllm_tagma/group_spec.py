"""KV-cache groups as the core knows them: what a row of the group looks like, and what a hit is."""

from __future__ import annotations

from typing import Literal, NamedTuple


class GroupSpec(NamedTuple):
    """One KV-cache group of a :class:`vllm_tagma._native.Pool`.

    ``prefix``: full attention, every block from the first position on. ``window``: a hit needs the
    last ``window_blocks`` blocks (``cdiv(sliding_window - 1, block_size)`` in vLLM), null blocks
    stand in front of them. ``state``: the last block alone. ``chunk``: chunked local attention,
    what is there of the chunk of ``window_blocks`` blocks that the next token is in; earlier
    chunks count as found. Hits end at multiples of ``align_blocks``, where another group has longer
    blocks.
    """

    kind: Literal["prefix", "window", "state", "chunk"] = "prefix"
    window_blocks: int = 1
    align_blocks: int = 1
