"""Presets: which settings a profile changes, and how long a run of it may take.

The GPU profiles have not been run on a GPU by us: their loads are chosen from the memory that a
request takes (a Llama 3.1 8B holds 128 KiB of KV a token), their times are guesses. See
``docs/bench-serve.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

SMOKE_DATASET: Final = Path(__file__).with_name("data") / "conversations.json"

# Llama 3.1 8B: 128K positions without scaling tricks, 16 GB of weights, one full-attention group.
_GPU_MODEL = "meta-llama/Llama-3.1-8B-Instruct"

PROFILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "cpu-smoke": {
        "device": "cpu",
        "dataset": str(SMOKE_DATASET),
        # bfloat16 is emulated on CPUs without AMX or AVX512-BF16, seven times slower.
        "dtype": "float32",
        "max_model_len": 1_024,
        "block_size": 32,
        # 68 blocks: the later stages evict what the earlier ones cached.
        "kv_cache_memory_bytes": 96 << 20,
        "enforce_eager": True,
        "concurrency": [4],
        "num_requests": 12,
        "min_context": 48,
        "max_context": 384,
        "max_output": 24,
        "turns": 4,
        "system_tokens": 96,
        "output_requests": 8,
        "output_tokens": 16,
        "sample_interval": 0.5,
        "ready_timeout": 400.0,
        "stage_timeout": 400.0,
        "disk_bytes": 256 << 20,
        "profile_requests": 6,
        "profile_steps": 30,
    },
    "gpu-16k": {
        "model": _GPU_MODEL,
        "max_model_len": 16_384,
        "concurrency": [8, 32, 96],
        "num_requests": 256,
        "min_context": 1_024,
        "max_context": 15_360,
        "max_output": 512,
        "turns": 6,
        "system_tokens": 1_024,
        "history_tokens": 2_048,
        "output_requests": 16,
        "output_tokens": 64,
        "repeats": 4,
        "disk_bytes": 4 << 30,
        "profile_requests": 64,
    },
    "gpu-128k": {
        "model": _GPU_MODEL,
        "max_model_len": 131_072,
        "concurrency": [2, 8],
        "num_requests": 48,
        "min_context": 16_384,
        "max_context": 126_976,
        "max_output": 1_024,
        "turns": 6,
        "system_tokens": 4_096,
        "history_tokens": 32_768,
        "output_requests": 6,
        "output_tokens": 64,
        "repeats": 4,
        "disk_bytes": 4 << 30,
        "stage_timeout": 14_400.0,
        "profile_requests": 8,
    },
}

# Seconds: start of a server, and a stage. Only for the estimate before anything was measured.
GUESSES: Final[Mapping[str, tuple[float, float]]] = {
    "cpu-smoke": (45.0, 30.0),
    "gpu-16k": (120.0, 180.0),
    "gpu-128k": (150.0, 420.0),
}
