"""What must be there before any server starts: each absence with its name and the way to get it.

All problems are reported at once; a series of hours must not fail one at a time.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

from vllm_tagma import versions
from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench_serve import commands, dataset, model
from vllm_tagma.lab.bench_serve.gpu import Gpu
from vllm_tagma.lab.bench_serve.serve_settings import Settings

_GIB = 1 << 30
# Measured with a small model: API server, engine core and worker, without weights and KV.
_CPU_RUNTIME_BYTES = 5 * _GIB // 2
_GPU_RUNTIME_BYTES = 3 * _GIB  # activations, CUDA graphs and the context; a guess on the low side
_PACKAGES = {
    "pandas": "vLLM's client reads the requests with it",
    "matplotlib": "the report draws with it",
    "scipy": "the intervals' Student t is its",
    "psutil": "memory of the server is read with it",
    "prometheus_client": "the server's metrics are read with it",
}


class Problem(NamedTuple):
    """What is missing, and how to get it."""

    what: str
    way_out: str


class PreflightError(TagmaError, RuntimeError):
    """Something that the series needs is missing; nothing was started."""

    def __init__(self, problems: list[Problem]) -> None:
        lines = [f"{problem.what}\n    {problem.way_out}" for problem in problems]
        super().__init__("\n  ".join(["nothing was started, because:", *lines]))
        self.problems = problems


def problems(settings: Settings, *, output: Path, gpus: list[Gpu]) -> list[Problem]:
    """Everything that would stop the series. Reads the dataset; starts nothing."""
    return [
        *_software(settings),
        *_gpu(settings, gpus),
        *_model(settings, gpus),
        *_dataset(settings),
        *_port(settings),
        *_disk(settings, output),
    ]


def _software(settings: Settings) -> list[Problem]:
    found = []
    program = commands.vllm_words(settings)[0]
    if shutil.which(program) is None:
        found.append(
            Problem(
                f"vLLM: there is no command {program!r}",
                "install vLLM into this Python's environment (make env), or name it with "
                "--vllm-command",
            )
        )
    elif not settings.vllm_command:
        try:
            versions.require_supported_vllm()
        except TagmaError as error:
            found.append(Problem(f"vLLM: {error}", "make env installs one that is known"))
    absent = {
        name: why for name, why in _PACKAGES.items() if importlib.util.find_spec(name) is None
    }
    if absent:
        reasons = "; ".join(f"{name} ({why})" for name, why in absent.items())
        found.append(
            Problem(f"Python packages: {reasons}", "pip install 'vllm-tagma[bench]', or make tools")
        )
    return found


def _gpu(settings: Settings, gpus: list[Gpu]) -> list[Problem]:
    if settings.device != "cuda":
        return []
    if not gpus:
        return [
            Problem(
                "GPU: nvidia-smi shows none (--device cuda)",
                "run this where an NVIDIA driver is installed and CUDA_VISIBLE_DEVICES names a "
                "GPU; --profile cpu-smoke needs none",
            )
        ]
    gpu = gpus[0]
    wanted = settings.gpu_memory_utilization * gpu.memory_total
    if gpu.memory_total - gpu.memory_used < wanted:
        return [
            Problem(
                f"GPU memory: {gpu.memory_used / _GIB:.1f} GiB of GPU {gpu.number} ({gpu.name}) "
                f"are in use, and vLLM would take {wanted / _GIB:.1f} of "
                f"{gpu.memory_total / _GIB:.1f}",
                "end what uses it (nvidia-smi lists the processes), choose another GPU with "
                "CUDA_VISIBLE_DEVICES, or lower --gpu-memory-utilization",
            )
        ]
    return []


def _model(settings: Settings, gpus: list[Gpu]) -> list[Problem]:
    if not settings.model:
        return [
            Problem(
                f"model: none given, and {model.SMOKE_FOLDER} is not here",
                "make serve prepares it in a clone of the repository; else name a folder or a hub "
                "id with --model",
            )
        ]
    folder = model.folder_of(settings.model)
    if folder is None:
        return [
            Problem(
                f"model: {settings.model} is neither a folder nor in the local cache of the hub",
                f"download it before: hf download {settings.model} (some models ask for consent on "
                "their page and a token: hf auth login), or name another with --model",
            )
        ]
    facts = model.read(folder)
    if facts is None:
        return [
            Problem(
                f"model: {folder} has no config.json that can be read",
                "name a folder with a model in the layout of transformers with --model",
            )
        ]
    found = []
    if facts.max_positions and settings.max_model_len > facts.max_positions:
        found.append(
            Problem(
                f"model: {settings.model} takes {facts.max_positions} positions, below "
                f"--max-model-len {settings.max_model_len}",
                "name a model with a longer context, or lower --max-model-len and --max-context",
            )
        )
    return found + _memory(settings, facts, gpus)


def _memory(settings: Settings, facts: model.Facts, gpus: list[Gpu]) -> list[Problem]:
    if settings.device == "cuda":
        if not gpus:
            return []
        have = settings.gpu_memory_utilization * gpus[0].memory_total
        kv = settings.kv_cache_memory_bytes or facts.kv_bytes(settings.max_model_len, settings)
        need, where = facts.weight_bytes + kv + _GPU_RUNTIME_BYTES, f"GPU {gpus[0].number}"
        way_out = "lower --max-model-len, or take a smaller model or a larger GPU"
    else:
        have = float(_available_bytes() or 0)
        kv = settings.kv_cache_memory_bytes or facts.kv_bytes(settings.max_model_len, settings)
        widened = 2 if settings.dtype == "float32" and facts.is_16_bit else 1
        need, where = facts.weight_bytes * widened + kv + _CPU_RUNTIME_BYTES, "this machine"
        way_out = "close other programs, or lower --kv-cache-memory-bytes"
    if not have or need <= have:
        return []
    return [
        Problem(
            f"memory: the server needs about {need / _GIB:.1f} GiB (weights "
            f"{facts.weight_bytes / _GIB:.1f}, KV {kv / _GIB:.1f}), {where} offers "
            f"{have / _GIB:.1f}",
            way_out,
        )
    ]


def _available_bytes() -> int | None:
    if importlib.util.find_spec("psutil") is None:
        return None
    import psutil

    return int(psutil.virtual_memory().available)


def _dataset(settings: Settings) -> list[Problem]:
    if not settings.dataset:
        return [
            Problem(
                "dataset: none given",
                "name a file in ShareGPT's JSON format with --dataset FILE, such as "
                "ShareGPT_V3_unfiltered_cleaned_split.json",
            )
        ]
    try:
        dataset.read(Path(settings.dataset))
    except dataset.DatasetError as error:
        return [Problem(f"dataset: {error}", "mend the file, or name another with --dataset FILE")]
    return []


def _port(settings: Settings) -> list[Problem]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
    except OSError as error:
        return [
            Problem(
                f"port: {settings.host}:{settings.port} cannot be used ({error.strerror})",
                "end what listens there (ss -ltnp names it), or choose another with --port",
            )
        ]
    return []


def _disk(settings: Settings, output: Path) -> list[Problem]:
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [Problem(f"disk: {folder} cannot be read: {error}", "choose another --output")]
    if free >= settings.disk_bytes:
        return []
    return [
        Problem(
            f"disk: {free / _GIB:.2f} GiB are free at {folder}, --disk-bytes asks for "
            f"{settings.disk_bytes / _GIB:.2f}",
            "free some, or choose an --output elsewhere",
        )
    ]
