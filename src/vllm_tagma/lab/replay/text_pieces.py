"""Texts and token ids as pieces of content that share what they share from the start.

There is no tokenizer at hand: a text counts as one token per four bytes of UTF-8, rounded up,
which is close for English text and too few for most others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from vllm_tagma.lab.replay.trace import Piece

BYTES_PER_TOKEN = 4
TOKENS_OF_A_PIECE = 16
"""Two prompts share whole pieces: as fine as vLLM's blocks usually are."""


def tokens_of(text: str) -> int:
    """Estimated tokens of a text."""
    return -(-len(_bytes(text)) // BYTES_PER_TOKEN)


def named(text: str, kind: str) -> Piece:
    """A text as one piece: equal texts of one kind (a sender, say) are equal content."""
    data = _bytes(text)
    content = hashlib.sha256(_bytes(kind) + b"\0" + data).hexdigest()
    return Piece(content, -(-len(data) // BYTES_PER_TOKEN))


def of_text(text: str) -> tuple[Piece, ...]:
    """A text in pieces of 16 tokens, so that texts share the beginning that they have in common."""
    data = _bytes(text)
    step = TOKENS_OF_A_PIECE * BYTES_PER_TOKEN
    parts = [data[i : i + step] for i in range(0, len(data), step)]
    return tuple(Piece(part.hex(), -(-len(part) // BYTES_PER_TOKEN)) for part in parts)


def of_token_ids(ids: Sequence[int]) -> tuple[Piece, ...]:
    """Token ids in pieces of 16 tokens."""
    step = TOKENS_OF_A_PIECE
    parts = [ids[i : i + step] for i in range(0, len(ids), step)]
    return tuple(Piece(" ".join(map(str, part)), len(part)) for part in parts)


def _bytes(text: str) -> bytes:
    # JSON can write half of a surrogate pair, which is no character but has a length.
    return text.encode("utf-8", "surrogatepass")
