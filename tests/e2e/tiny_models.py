"""Tiny models with seeded random weights, written as vLLM loads them.

Weights are large enough that the next token depends on the whole context, so that a wrong slot
shows in the tokens. Each writer takes an existing folder and returns it. All speculators share one
target, whose last layer changes little, so that drafts made from its first layer are often right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 128
HIDDEN = 128
_WINDOW = 64  # tokens
_SHARP = ("q_proj", "k_proj", "kv_b_proj")  # attention that looks at few positions
_WEIGHTS = "model.safetensors"

Tensors = dict[str, torch.Tensor]
Writer = Callable[[Path], Path]


def full_llama(folder: Path) -> Path:
    """Full attention only: Llama with 2 layers, 4 heads and 2 KV heads of size 32."""
    return _save(folder, _llama(layers=2))


def one_layer_llama(folder: Path) -> Path:
    """``full_llama`` with one layer."""
    return _save(folder, _llama(layers=1))


def spec_target(folder: Path) -> Path:
    """``full_llama`` whose second layer adds little and whose embeddings have a root mean square
    of 1, so that a norm leaves them as they are."""
    return _save(folder, _llama(layers=2), edit=_first_layer_decides)


def draft_llama(folder: Path, target: Path) -> Path:
    """The target without its second layer, which often agrees with it."""
    weights = load_file(target / _WEIGHTS)
    kept = {name: w for name, w in weights.items() if not name.startswith("model.layers.1.")}
    return _write(folder, {**_config(target), "num_hidden_layers": 1}, kept)


def eagle_head(folder: Path, target: Path) -> Path:
    """An EAGLE head that is the target's first layer and hardly looks at the hidden states."""
    weights = {
        name.removeprefix("model."): weight
        for name, weight in load_file(target / _WEIGHTS).items()
        if name.startswith("model.layers.0.")
    }
    weights.pop("layers.0.input_layernorm.weight")
    eye = torch.eye(HIDDEN)
    weights["fc.weight"] = torch.cat([eye, 0.01 * eye], 1)
    return _write(folder, {**_config(target), "num_hidden_layers": 1}, weights)


def eagle3_head(folder: Path, target: Path) -> Path:
    """An EAGLE-3 head that knows little but the last token, so that some drafts are right.

    Queries equal keys, so that each position looks at itself alone; its value is the half of
    its token's embedding (two KV heads of 32) that the output layer weighs most. The hidden states
    of three layers add a little, the MLP nothing.
    """
    one = torch.ones(HIDDEN)
    lm_head = load_file(target / _WEIGHTS)["lm_head.weight"]
    half = torch.linalg.svd(lm_head).Vh[: HIDDEN // 2].T
    nothing = torch.zeros(HIDDEN // 2, HIDDEN)
    look = torch.cat([2.0 * _random(HIDDEN // 2, HIDDEN), nothing], 1)
    heads = [0, 0, 1, 1]  # the KV head of each head
    out = torch.cat([half.view(HIDDEN, 2, 32)[:, head] / 2 for head in heads], 1)
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    weights = {
        "fc.weight": 0.1 * _random(HIDDEN, 3 * HIDDEN),
        "norm.weight": one,
        "midlayer.hidden_norm.weight": one,
        "midlayer.input_layernorm.weight": one,
        "midlayer.post_attention_layernorm.weight": one,
        f"{attention}q_proj.weight": torch.cat([look.view(2, 32, -1)[head] for head in heads]),
        f"{attention}k_proj.weight": look,
        f"{attention}v_proj.weight": torch.cat([half.T, nothing], 1),
        f"{attention}o_proj.weight": out,
        f"{mlp}gate_proj.weight": _random(256, HIDDEN),
        f"{mlp}up_proj.weight": _random(256, HIDDEN, seed=8),
        f"{mlp}down_proj.weight": torch.zeros(HIDDEN, 256),
        "lm_head.weight": lm_head,
    }
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    changes = {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        "eagle_config": layers,
        **layers,
    }
    return _write(folder, {**_config(target), **changes}, weights)


def medusa_head(folder: Path, target: Path) -> Path:
    """Two Medusa heads with random blocks in front of the target's own output layer."""
    weights: Tensors = {}
    for head in range(2):
        weights[f"blocks.{head}.layers.0.weight"] = _random(HIDDEN, HIDDEN, seed=head)
        weights[f"blocks.{head}.layers.0.bias"] = torch.zeros(HIDDEN)
        weights[f"lm_heads.{head}.weight"] = load_file(target / _WEIGHTS)["lm_head.weight"]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "torch_dtype": "float32",
    }
    return _write(folder, config, weights)


def mtp_glm(folder: Path) -> Path:
    """A mixture-of-experts model (GLM 4) of two layers with a third one for multi-token prediction,
    which knows little but the last token."""
    from transformers import Glm4MoeConfig

    config = Glm4MoeConfig(
        **_COMMON,
        num_hidden_layers=3,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )
    _save(folder, config, edit=_first_layer_decides)
    weights, one, layer = load_file(folder / _WEIGHTS), torch.ones(HIDDEN), "model.layers.2."
    eye = torch.eye(HIDDEN)
    weights |= {
        f"{layer}enorm.weight": one,
        f"{layer}hnorm.weight": one,
        f"{layer}eh_proj.weight": torch.cat([eye, 0.01 * eye], 1),
        f"{layer}shared_head.norm.weight": one,
        f"{layer}shared_head.head.weight": weights["lm_head.weight"],
    }
    changes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return _write(folder, {**_config(folder), **changes}, weights)


def window_mistral(folder: Path) -> Path:
    """A window of 64 tokens in both layers: Mistral, one KV-cache group."""
    from transformers import MistralConfig

    return _save(folder, MistralConfig(**_COMMON, num_hidden_layers=2, sliding_window=_WINDOW))


def mixed_gemma3(folder: Path) -> Path:
    """Gemma 3 of 6 layers, every third one with full attention: two window groups and a full one
    of two layers each. Embeddings are tied, hence small."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **{**_COMMON, "tie_word_embeddings": True},
        num_hidden_layers=6,
        sliding_window=_WINDOW,
        query_pre_attn_scalar=32,
        layer_types=kinds,
    )

    def small(model: Any) -> None:
        model.model.embed_tokens.weight.mul_(0.01)

    return _save(folder, config, edit=small)


def mixed_gptoss(folder: Path) -> Path:
    """gpt-oss of 4 layers, window and full attention in turn: two groups of two layers."""
    from transformers import GptOssConfig

    config = GptOssConfig(
        **{**_COMMON, "intermediate_size": 128},
        num_hidden_layers=4,
        sliding_window=_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return _save(folder, config)


def mixed_llama4(folder: Path) -> Path:
    """Llama 4 of 4 layers, chunks of 64 tokens and full attention in turn: two groups of two layers
    where vLLM keeps them apart, which it does not by default."""
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size_mlp=256,
        attention_chunk_size=_WINDOW,
        no_rope_layers=[1, 0] * 2,
        layer_types=["chunked_attention", "full_attention"] * 2,
        moe_layers=[],
        interleave_moe_layer_step=1000,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    return _save(folder, config)


def mla_deepseek(folder: Path) -> Path:
    """DeepSeek-V2 of 2 layers: multi-head latent attention, one vector of 576 numbers a token, the
    size that vLLM's CPU kernel is made for."""
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        **{**_COMMON, "num_key_value_heads": 4, "head_dim": 64},
        num_hidden_layers=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    )
    return _save(folder, config)


def lora_adapter(folder: Path, name: str) -> Path:
    """An adapter of rank 8 for ``full_llama``; its weights depend on ``name``."""
    weights: Tensors = {}
    for layer in range(2):
        for part, width in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{at}.lora_A.weight"] = _random(8, HIDDEN, seed=len(name))
            weights[f"{at}.lora_B.weight"] = 2.0 * _random(width, 8, seed=len(name))
    save_file(_separate(weights), folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def int8_llama(folder: Path) -> Path:
    """``full_llama`` with weights of 8 bits (W8A8, one scale an output channel)."""
    full_llama(folder)
    weights: Tensors = {}
    for name, weight in load_file(folder / _WEIGHTS).items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[name + "_scale"] = scale
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    quantised = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight, "strategy": "token", "dynamic": True},
            }
        },
    }
    return _write(folder, {**_config(folder), "quantization_config": quantised}, weights)


def add_tokenizer(folder: Path) -> Path:
    """A tokenizer of ``VOCAB`` words, w0 to w127, for what insists on text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w2"
    ).save_pretrained(folder)
    return folder


# --- how they are made ----------------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def _llama(*, layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, num_hidden_layers=layers)


def _first_layer_decides(model: Any) -> None:
    """Later layers add little, and a norm leaves embeddings as they are."""
    table = model.model.embed_tokens.weight
    table.mul_(table.pow(2).mean(1, keepdim=True).rsqrt())
    for layer in model.model.layers[1:]:
        for name, weight in layer.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.2)


def _save(folder: Path, config: Any, *, edit: Callable[[Any], None] | None = None) -> Path:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                continue
            size = 1.0
            if "embed" not in name:
                fan_in = weight.shape[-2] if weight.dim() == 3 else weight[0].numel()
                size = (2.0 if any(part in name for part in _SHARP) else 1.0) / fan_in**0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * size)
        if edit:
            edit(model)
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)
    return folder


def _random(*shape: int, seed: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _separate(weights: Tensors) -> Tensors:
    """safetensors refuses tensors that share memory."""
    return {name: weight.contiguous().clone() for name, weight in weights.items()}


def _write(folder: Path, config: dict[str, Any], weights: Tensors) -> Path:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_separate(weights), folder / _WEIGHTS, {"format": "pt"})
    return folder
