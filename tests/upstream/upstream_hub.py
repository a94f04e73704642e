"""A folder in the layout of a model hub's cache with the models that vLLM's scheduler tests name.

Only their configurations and tokenizers are asked for, never weights, so stand-ins of a few
kilobytes serve, and no test reaches for a hub. What counts is kept: context length, vocabulary,
tokens per image. The multimodal stand-in has another architecture than its namesake, whose image
processor needs torchvision, which the CPU environment leaves out (``tools/environment.py``).
"""

from __future__ import annotations

import json
from pathlib import Path

_COMMIT = "0" * 40
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
_QWEN = {
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_BLIP2 = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    "image_token_index": 32000,
    "num_query_tokens": 576,  # of one image of LLaVA 1.5
    "use_decoder_only_language_model": True,
    "torch_dtype": "float16",
    "text_config": {**_OPT, "max_position_embeddings": 4096},
    "qformer_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 1408},
    "vision_config": {"model_type": "blip_2_vision_model"},
}
_BLIP2_IMAGES = {
    "image_processor_type": "BlipImageProcessor",
    "processor_class": "Blip2Processor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "resample": 3,
    "size": {"height": 224, "width": 224},
}
_SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
}


def models() -> dict[str, dict[str, object]]:
    """File contents by file name, by name of the model."""
    text = {"tokenizer.json": byte_tokenizer(_SPECIAL), "tokenizer_config.json": _TOKENIZER}
    opt = {"config.json": _OPT, **text}
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    images = {
        "config.json": _BLIP2,
        "tokenizer.json": byte_tokenizer({**_SPECIAL, "<image>": 32000}),
        "tokenizer_config.json": {**_TOKENIZER, "processor_class": "Blip2Processor"},
        "preprocessor_config.json": _BLIP2_IMAGES,
        "processor_config.json": {"num_query_tokens": 576, "processor_class": "Blip2Processor"},
    }
    return {
        "facebook/opt-125m": opt,
        "facebook/opt-350m": opt,
        "Qwen/Qwen3-0.6B": {"config.json": {**_QWEN, **qwen3}, **text},
        "Qwen/Qwen1.5-7B": {
            "config.json": {**_QWEN, **qwen2, "max_position_embeddings": 32768},
            **text,
        },
        "llava-hf/llava-1.5-7b-hf": images,
        "Qwen/Qwen2.5-VL-3B-Instruct": images,
    }


def write_hub(home: Path) -> Path:
    """Write the stand-ins below ``home``, which is what ``HF_HOME`` names; returns it."""
    for name, files in models().items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / _COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(_COMMIT, encoding="utf-8")
        for file, content in files.items():
            (snapshot / file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return home


def byte_tokenizer(special: dict[str, int]) -> dict[str, object]:
    """A tokenizer with one token a byte and the ``special`` ones at the ids that they name."""
    taken = set(special.values())
    free = (number for number in range(len(special) + 256) if number not in taken)
    vocabulary = {**special, **{letter: next(free) for letter in _byte_letters()}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    added = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, number in special.items()
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {**byte_level, "trim_offsets": True},
        "decoder": {**byte_level, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    beyond = iter(range(256, 512))
    return [chr(byte if byte in printable else next(beyond)) for byte in range(256)]
