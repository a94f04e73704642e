"""Subjects of the self-test, with the shapes of models, for the CPU and for kernels."""

from __future__ import annotations

from typing import Any

import torch

from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.worker.self_test import Subject

BLOCKS = 200


def subject_of(device: str = "cpu", *, interpreted: bool = False, **changes: Any) -> Subject:
    """Two groups of blocks of 16 and 32 tokens; two layers of bfloat16, keys and values apart."""
    caches = [
        torch.zeros((2, BLOCKS, 16, 2, 8), dtype=torch.bfloat16, device=device).transpose(0, 1),
        torch.zeros((4 * BLOCKS, 2, 4, 2, 8), dtype=torch.float16, device=device),
    ]
    caches = changes.pop("kv_caches", caches)
    num_blocks = changes.pop("num_blocks", BLOCKS)
    arguments: dict[str, Any] = {
        "device": torch.device(device),
        "block_sizes": [16, 32],
        "widths": [150, 80],
        "rows": 8,
        "max_tokens": 1500,
        "kv_caches": caches,
        "num_blocks": num_blocks,
        "mover": BlockCopies(interpreted=interpreted).mover(caches, num_blocks),
    }
    return Subject(**{**arguments, **changes})
