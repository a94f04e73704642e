"""A 2-layer Llama configuration, for measurements that need a model but not its answers.

vLLM loads it with dummy weights. It is so small that a step is bound by the scheduler, which is
where a KV-cache manager shows.
"""

from __future__ import annotations

import json
from pathlib import Path

_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def write_tiny_model(folder: Path, **changes: object) -> None:
    """Writes ``config.json``, with ``changes``, into an existing folder, which then serves as
    vLLM's ``model``."""
    (folder / "config.json").write_text(json.dumps(_CONFIG | changes), encoding="utf-8")
