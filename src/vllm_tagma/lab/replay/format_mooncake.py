"""Mooncake's JSONL: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

Each hash id names one block of 512 prompt tokens together with everything before it, so it serves
as a piece of content. The last one covers what is left of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_tagma.lab.replay.json_fields import FieldError, first_object, integer, json_lines, seconds
from vllm_tagma.lab.replay.trace import BadLine, Piece, TraceRequest

HASH_BLOCK_TOKENS = 512


def detect(head: str) -> bool:
    """True for a file whose first object has Mooncake's fields."""
    entry = first_object(head)
    return entry is not None and {"input_length", "output_length"} <= entry.keys()


def parse(path: Path) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad lines of a file, in order."""
    return json_lines(path, _request)


def _request(entry: dict[str, Any], place: str, _: int) -> TraceRequest:
    tokens = integer(entry, "input_length")
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise FieldError("hash_ids is missing or no list of integers")
    expected = -(-tokens // HASH_BLOCK_TOKENS)
    if len(ids) != expected:
        raise FieldError(
            f"has {len(ids)} hash_ids for input_length {tokens}, which is {expected} blocks of "
            f"{HASH_BLOCK_TOKENS} tokens"
        )
    pieces = [Piece(f"m{i}", HASH_BLOCK_TOKENS) for i in ids]
    pieces[-1] = Piece(pieces[-1].content, tokens - HASH_BLOCK_TOKENS * (len(ids) - 1))
    return TraceRequest(
        place=place,
        prompt=tuple(pieces),
        output_tokens=integer(entry, "output_length"),
        arrival=seconds(entry, "timestamp", scale=1e-3),
    )
