"""A Llama or a mixture of experts of two layers with seeded weights, and a tokenizer of words.

The weights are large enough that the next token depends on the whole context, so that a block of
KV in the wrong place shows in the tokens; in float32 the best token leads by far more than what
another order of summation changes, so that requests may be batched in any way. Heads and KV heads
split in two.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 512
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 128, 256, 2, 4, 2, 32
_EXPERTS, _EXPERT_INNER = 4, 64
_COMMON: dict[str, object] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": _EXPERT_INNER,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def write_seeded_model(folder: Path, *, experts: bool = False) -> None:
    """Writes weights, ``config.json`` and a tokenizer of the words w0 to w511 into a folder."""
    config = _COMMON | (_MOE if experts else _LLAMA)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(experts), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)


def _weights(experts: bool) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * gain / columns**0.5

    def mlp(prefix: str, inner: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": matrix(inner, _HIDDEN),
            f"{prefix}.up_proj.weight": matrix(inner, _HIDDEN),
            f"{prefix}.down_proj.weight": matrix(_HIDDEN, inner),
        }

    found = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, _HIDDEN, generator=random),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN, 4.0),
    }
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        found |= {
            f"{layer}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{layer}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD, _HIDDEN, 2.0),
            f"{layer}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN, 2.0),
            f"{layer}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD, 2.0),
        }
        if not experts:
            found |= mlp(f"{layer}.mlp", _INNER)
            continue
        found[f"{layer}.mlp.gate.weight"] = matrix(_EXPERTS, _HIDDEN, 2.0)
        for norm in ("q_norm", "k_norm"):
            found[f"{layer}.self_attn.{norm}.weight"] = torch.ones(_HEAD)
        for expert in range(_EXPERTS):
            found |= mlp(f"{layer}.mlp.experts.{expert}", _EXPERT_INNER)
    return found


def _write_tokenizer(folder: Path) -> None:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "bos_token": "w1",
        "eos_token": "w2",
        "model_max_length": 4096,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
