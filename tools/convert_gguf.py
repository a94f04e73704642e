"""Convert a GGUF checkpoint into a bf16 safetensors folder that vLLM serves.

Runs inside the project's .venv (it needs torch, transformers, gguf and accelerate), started by
default_model.py. It writes into the folder it is given and nothing else; making that folder appear
at its final place only when it is whole is the caller's part.

    python convert_gguf.py GGUF_FILE OUT_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(*, gguf_file: Path, out_dir: Path) -> None:
    """Write config, weights, tokenizer and chat template of ``gguf_file`` into ``out_dir``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(gguf_file.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file.name)
    model = model.to(torch.bfloat16)
    # The loader marks the dequantised model as still quantised, and save_pretrained refuses that.
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf_file.name} carries no chat template: the chat API cannot serve it")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    convert(gguf_file=Path(sys.argv[1]), out_dir=Path(sys.argv[2]))
