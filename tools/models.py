"""Resolve what MODEL=... means: the default model, a local folder, or the id of a model hub.

Asked before anything long starts, so that a typing mistake costs a second and not an installation.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import default_model
from progress import SetupFailure

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DEFAULT_HUB = "https://huggingface.co"
LOOKUP_SECONDS = 10.0


@dataclass(frozen=True)
class Model:
    """What to serve: ``source`` is vLLM's model argument, ``name`` the served model name."""

    source: str
    name: str
    is_default: bool = False
    weight_bytes: int = 0  # 0 when it is not known before the download
    has_chat: bool = True


def resolve(*, text: str, root: Path) -> Model:
    """Turn the user's MODEL into a Model. Raises SetupFailure if it names nothing."""
    if not text or text == default_model.NAME:
        folder = default_model.model_dir(root)
        size = 280 << 20  # bf16 weights and tokenizer of 135 M parameters
        return Model(str(folder), default_model.NAME, is_default=True, weight_bytes=size)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return _local(folder, text)
    looks_local = text.startswith(("/", "./", "../", "~")) or text.count("/") > 1
    if looks_local or not HUB_ID.fullmatch(text):
        raise SetupFailure(
            f"MODEL={text} is neither a folder that exists ({folder.absolute()}) nor a model hub "
            "id of the form owner/name. Check the path, or leave MODEL out for the default model "
            f"({default_model.NAME})."
        )
    _look_up(text)
    return Model(text, text)


def _local(folder: Path, text: str) -> Model:
    if not (folder / "config.json").is_file():
        raise SetupFailure(
            f"MODEL={text} is a folder without a config.json, so it is no model that vLLM can "
            "load. Name the folder that holds config.json, the *.safetensors files and the "
            "tokenizer."
        )
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return Model(
        str(folder.resolve()),
        folder.resolve().name,
        weight_bytes=sum(sizes),
        has_chat=_has_chat_template(folder),
    )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(config.get("chat_template"))


def _look_up(hub_id: str) -> None:
    """Ask the hub for the model's config.json unless a copy of the model is cached."""
    cache = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub_cache = Path(cache) if cache else Path(home) / "hub"
    if any(hub_cache.glob(f"models--{hub_id.replace('/', '--')}/snapshots/*/config.json")):
        return
    hub = os.environ.get("HF_ENDPOINT", DEFAULT_HUB).rstrip("/")
    headers = {"User-Agent": "vllm-tagma"}
    if token := os.environ.get("HF_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    url = f"{hub}/{hub_id}/resolve/main/config.json"
    try:
        request = urllib.request.Request(url, headers=headers, method="HEAD")
        urllib.request.urlopen(request, timeout=LOOKUP_SECONDS).close()
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 404):
            return  # the hub is there but unwell: let vLLM try
        raise SetupFailure(
            f"MODEL={hub_id} is no folder here, and the hub {hub} has no such model to give "
            f"(HTTP {error.code}). Check the spelling (owner/name), set HF_TOKEN if the model is "
            f"gated or private, or leave MODEL out for the default model ({default_model.NAME})."
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SetupFailure(
            f"MODEL={hub_id} is no folder here, and the hub {hub} could not be asked for it: "
            f"{reason}. Check the network or HF_ENDPOINT, give the path of a local model folder, "
            f"or leave MODEL out for the default model ({default_model.NAME})."
        ) from error
