"""Block hashes from content: equal exactly when everything up to the end of the block is equal."""

from __future__ import annotations

import itertools
import random

import pytest

from vllm_tagma.lab.replay.hashes import HASH_BYTES, block_hashes
from vllm_tagma.lab.replay.trace import Piece


def tokens_of(pieces: list[Piece]) -> list[tuple[str, int]]:
    """The tokens that pieces stand for, each as its stream and its place in it."""
    return [(content, i) for content, count in pieces for i in range(count)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_equal_hash_means_equal_prefix(block_size: int) -> None:
    rng = random.Random(3)
    sequences = [
        [Piece(rng.choice("ab"), rng.choice((1, 7, 16, 33))) for _ in range(rng.randint(1, 4))]
        for _ in range(120)
    ]
    meaning: dict[bytes, tuple] = {}
    for pieces in sequences:
        tokens = tokens_of(pieces)
        hashes = block_hashes(pieces, block_size)
        assert len(hashes) == len(tokens) // block_size
        for number, value in enumerate(hashes, 1):
            assert len(value) == HASH_BYTES
            prefix = tuple(tokens[: number * block_size])
            assert meaning.setdefault(value, prefix) == prefix


def test_shared_pieces_share_their_blocks() -> None:
    """The hash needs more than an equal prefix: the same pieces, the last one perhaps longer."""
    base = [Piece("s", 40), Piece("u", 30)]
    longer = [*base[:1], Piece("u", 64), Piece("v", 16)]
    short, long = block_hashes(base, 16), block_hashes(longer, 16)
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)
    other = block_hashes([Piece("s", 40), Piece("w", 30)], 16)
    same = sum(a == b for a, b in itertools.zip_longest(short, other))
    assert same == 40 // 16


def test_block_sizes_do_not_mix_with_positions() -> None:
    """The same stream at another position is other content."""
    assert (
        block_hashes([Piece("s", 16)], 16) != block_hashes([Piece("t", 16), Piece("s", 16)], 16)[1:]
    )
