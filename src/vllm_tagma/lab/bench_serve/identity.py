"""What a run depends on beside its settings, as far as it can be told apart: software, data, card.

A series must not mix two of these. Versions and commit are not enough while somebody develops: the
files of the installed package are hashed as well, at the start and before each run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from vllm_tagma import versions
from vllm_tagma.lab.bench import environment
from vllm_tagma.lab.bench_serve import model
from vllm_tagma.lab.bench_serve.gpu import Gpu
from vllm_tagma.lab.bench_serve.serve_settings import Settings

_PACKAGE = Path(__file__).resolve().parents[2]
# What only measures or reports does not change what is measured.
_BESIDE = {"bench", "report"}
_VARIABLES = ("VLLM_", "CUDA_", "OMP_", "TORCH_", "NCCL_", "HF_HUB_OFFLINE", "TRITON_")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def facts(settings: Settings, found: list[Gpu]) -> dict[str, Any]:
    """The identity of a series; ``--resume`` refuses another one. ``found``: the GPUs."""
    folder = model.folder_of(settings.model)
    what = model.read(folder) if folder is not None else None
    data = Path(settings.dataset)
    return {
        "vllm": versions.installed_vllm_version(),
        "vllm_tagma": versions.tagma_version(),
        "package": package_hash(),
        "commit": environment.capture()["source"]["commit"],
        "model": what.fingerprint if what is not None else None,
        "dataset": hashlib.sha256(data.read_bytes()).hexdigest() if data.is_file() else None,
        "gpus": [[gpu.number, gpu.name, gpu.driver, gpu.memory_total] for gpu in found],
    }


def package_hash() -> str:
    """Of this package's Python files and its native module, those that serve."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.relative_to(_PACKAGE).parts[0] not in _BESIDE:
            digest.update(path.read_bytes())
    native = importlib.util.find_spec("vllm_tagma._native")
    if native is not None and native.origin:
        digest.update(Path(native.origin).read_bytes())
    return digest.hexdigest()


def capture(found: list[Gpu]) -> dict[str, Any]:
    """The environment of the series, as recorded and shown in the report."""
    return {
        **environment.capture(),
        "gpus": [gpu._asdict() for gpu in found],
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not any(word in name for word in _SECRETS)
        },
    }
