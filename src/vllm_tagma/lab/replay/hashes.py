"""Block hashes from pieces of content, in place of hashes of token ids.

vLLM chains: a block's hash covers everything before it. So does this: the hashes of the blocks that
end inside a piece come from one extendable digest, seeded by the chain up to the piece and the
piece's content id. One digest a piece and a slice a block, since a replay of a long trace hashes
ten million blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from vllm_tagma.lab.replay.trace import Piece

HASH_BYTES = 32


def block_hashes(pieces: Iterable[Piece], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of a sequence, 32 bytes each.

    Equal hashes mean equal content up to the end of the block. A piece that is cut shorter agrees
    with the longer one on the blocks that end inside the shorter. O(blocks + pieces).
    """
    chain = b""
    position = 0
    hashes: list[bytes] = []
    for content, tokens in pieces:
        seed = hashlib.sha256(chain + content.encode()).digest()
        end = position + tokens
        num_bytes = (end // block_size - position // block_size) * HASH_BYTES
        if num_bytes:
            stream = hashlib.shake_128(seed).digest(num_bytes)
            hashes += [stream[i : i + HASH_BYTES] for i in range(0, num_bytes, HASH_BYTES)]
        # The length is part of what follows: the next piece begins at another position otherwise.
        chain = hashlib.sha256(seed + tokens.to_bytes(8, "big")).digest()
        position = end
    return hashes
