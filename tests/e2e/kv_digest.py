"""What blocks hold, in a few characters: equal digests are equal KV, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def kv_digest(caches: Iterable[Any], block_ids: Sequence[int]) -> str:
    """The number of blocks, and a digest of their KV in each of the layers' caches."""
    blocks = torch.tensor(block_ids, dtype=torch.long)
    sha = hashlib.sha1()
    for cache in caches:
        sha.update(cache[blocks].contiguous().view(torch.uint8).numpy().tobytes())
    return f"{len(blocks)}:{sha.hexdigest()}"
