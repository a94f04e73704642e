"""A model's folder, and what its files say about memory: read without loading anything."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from vllm_tagma.lab.bench_serve.serve_settings import Settings

SMOKE_FOLDER = ".model/SmolLM2-135M-Instruct"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class Facts(NamedTuple):
    """Bytes of the weight files, positions the model takes (0: not said), KV geometry."""

    weight_bytes: int
    max_positions: int
    is_16_bit: bool
    kv_values_per_token: int
    fingerprint: str

    def kv_bytes(self, tokens: int, settings: Settings) -> int:
        """Bytes of KV of one request of ``tokens`` tokens."""
        return tokens * self.kv_values_per_token * (4 if settings.dtype == "float32" else 2)


def smoke_model() -> str:
    """The model that ``make serve`` prepares: below the current folder, or in the clone that this
    package runs from; empty if it is in neither."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[4]):
        if (root / SMOKE_FOLDER / "config.json").is_file():
            return str(root / SMOKE_FOLDER)
    return ""


def folder_of(name: str) -> Path | None:
    """The folder of a model given by folder or hub id; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not cached, not an id at all: the hub's exceptions vary with its version
        return None


def read(folder: Path) -> Facts | None:
    """What the folder says; None without a config.json that can be read."""
    try:
        data = (folder / "config.json").read_bytes()
        config = json.loads(data)
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    sizes = {
        path.name: path.stat().st_size for kind in _WEIGHTS for path in sorted(folder.glob(kind))
    }
    digest = hashlib.sha256(data + json.dumps(sizes, sort_keys=True).encode()).hexdigest()
    return Facts(
        weight_bytes=sum(sizes.values()),
        max_positions=_number(config, "max_position_embeddings"),
        is_16_bit=str(config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16"),
        kv_values_per_token=_kv_values(config),
        fingerprint=digest,
    )


def _kv_values(config: dict[str, Any]) -> int:
    """Keys and values of one token over all layers, for plain attention."""
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    size = _number(config, "head_dim")
    if not size and heads:
        size = _number(config, "hidden_size") // heads
    return 2 * _number(config, "num_hidden_layers") * kv_heads * size


def _number(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0
