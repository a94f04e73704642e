"""Flags for a machine and a model: what ``tagma doctor`` suggests, each with its reason.

Only what vLLM does not find out itself, and nothing that the user has decided. The figures are
estimates on the safe side; ``docs/using.md`` says what they rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_tagma.machine import Machine

GIB = 1 << 30
RUNTIME_BYTES = 5 * GIB // 2
"""API server, engine core and worker on a CPU, without weights and KV: measured, small model."""

VLLM_SHARE = 0.92
"""Of all memory: what vLLM 0.32 and 0.33 ask for without a flag, on a CPU too."""


@dataclass(frozen=True, kw_only=True)
class ModelNeeds:
    """What a model asks of memory. ``weights`` is 0 where they are not on this disk yet."""

    weights: int
    kv_bytes_per_token: int
    max_model_len: int
    kv_heads: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``setting``: words of the command line, or ``NAME=value`` for the environment; empty for a
    remark. ``why``: one sentence."""

    setting: str
    why: str

    @property
    def is_variable(self) -> bool:
        """Whether it goes before the command."""
        return bool(self.setting) and not self.setting.startswith("-")


def model_needs(vllm_config: Any) -> ModelNeeds:
    """Read from a finished ``VllmConfig``. Looks at the model's folder, loads nothing."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_kv_heads(parallel)
    element = 1 if "fp8" in str(vllm_config.cache_config.cache_dtype) else model.dtype.itemsize
    layers = model.get_num_layers(parallel)
    folder = Path(model.model)
    files = [path for kind in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(kind)]
    return ModelNeeds(
        weights=sum(path.stat().st_size for path in files),
        kv_bytes_per_token=2 * layers * heads * model.get_head_size() * element,
        max_model_len=model.max_model_len,
        kv_heads=heads * parallel.tensor_parallel_size,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def advise(
    machine: Machine, needs: ModelNeeds | None = None, *, given: Sequence[str] = (), cuda: bool
) -> list[Advice]:
    """What to start with here. ``given``: the user's own vLLM flags; ``cuda``: vLLM's CUDA build.

    ``needs`` is None where no model was named: then nothing that depends on one is said.
    """
    if cuda and machine.gpus:
        return [
            Advice(
                setting="",
                why=f"{machine.gpus[0]}: each start compares the kernels with their references "
                "there (--tagma-self-test start, the default); no test of an engine has run on one",
            )
        ]
    names = _names(given)
    dtype, nodes = _dtype(machine, needs, names), _nodes(machine, needs, names)
    if needs and dtype:
        needs = _scaled(needs, 2.0)
    if nodes:  # a pool lies on one node, and ranks share weights and heads
        count = len(machine.nodes)
        machine = replace(
            machine, memory=machine.memory // count, free_memory=machine.free_memory // count
        )
        if needs and not nodes[0].is_variable:
            needs = _scaled(needs, 1 / count)
    advice = [*_memory(machine, needs, names), *dtype, *_threads(machine), *nodes]
    if machine.gpus:
        why = f"{machine.gpus[0]} stays idle: this vLLM is a CPU build (TAGMA_CUDA=1 make serve)"
        advice.append(Advice(setting="", why=why))
    return advice


def command(advice: Sequence[Advice], model: str | None, given: Sequence[str]) -> str:
    """The line to paste."""
    variables = [item.setting for item in advice if item.is_variable]
    flags = [item.setting for item in advice if item.setting and not item.is_variable]
    serve = ["vllm serve", model or "MODEL", "--kv-cache-backend tagma"]
    return " ".join([*variables, *serve, *given, *flags])


def _scaled(needs: ModelNeeds, factor: float) -> ModelNeeds:
    return replace(
        needs,
        weights=int(needs.weights * factor),
        kv_bytes_per_token=int(needs.kv_bytes_per_token * factor),
    )


def _names(given: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in given if word.startswith("-")}


def _memory(machine: Machine, needs: ModelNeeds | None, given: set[str]) -> list[Advice]:
    decided = {"--kv-cache-memory-bytes", "--gpu-memory-utilization"} & given
    if decided or not machine.memory:
        return []
    free, wanted = machine.free_memory, int(VLLM_SHARE * machine.memory)
    weights = needs.weights if needs else 0
    # A quarter of the rest stays free: for other programs, and for activations that are not known.
    room = (free - weights - RUNTIME_BYTES) * 3 // 4
    if room <= 0:
        why = (
            f"{_gib(free)} are free, and the server needs {_gib(RUNTIME_BYTES)} beside "
            f"{_gib(weights)} of weights: end other programs, or take a smaller model"
        )
        return [Advice(setting="", why=why)]
    size = max(room // GIB, 1) * GIB if room >= GIB else room // (1 << 20) * (1 << 20)
    why = (
        f"{_gib(free)} of {_gib(machine.memory)} are free; vLLM asks for {VLLM_SHARE:.0%} of all "
        f"({_gib(wanted)})" + (" and would not start" if wanted > free else "")
    )
    found = [Advice(setting=f"--kv-cache-memory-bytes {size}", why=why)]
    if needs is None:
        return found
    tokens = size // max(needs.kv_bytes_per_token, 1)
    if tokens < needs.max_model_len and "--max-model-len" not in given:
        shorter = max(tokens * 9 // 10 // 128 * 128, 128)
        why = (
            f"the pool holds {tokens:,} tokens, fewer than one request of the model's "
            f"{needs.max_model_len:,}, and vLLM would not start"
        )
        found.append(Advice(setting=f"--max-model-len {shorter}", why=why))
    return found


def _dtype(machine: Machine, needs: ModelNeeds | None, given: set[str]) -> list[Advice]:
    if machine.bfloat16 or "--dtype" in given or (needs and needs.dtype != "bfloat16"):
        return []
    why = (
        "this CPU emulates bfloat16 (no avx512_bf16, amx_bf16 or ARM's bf16): float32 is often "
        "faster; weights and KV take twice the memory"
    )
    return [Advice(setting="--dtype float32", why=why)]


def _threads(machine: Machine) -> list[Advice]:
    quota = machine.cpu_quota
    if quota is None or quota >= machine.cpus:
        return []
    threads = max(int(quota), 1)
    why = (
        f"the container may use {quota:g} of {machine.cpus} CPUs; with a thread on each they are "
        f"stopped in turn"
    )
    return [
        Advice(setting=f"OMP_NUM_THREADS={threads}", why=why),
        Advice(setting="VLLM_CPU_OMP_THREADS_BIND=nobind", why="or vLLM binds one to every CPU"),
    ]


def _nodes(machine: Machine, needs: ModelNeeds | None, given: set[str]) -> list[Advice]:
    count = len(machine.nodes)
    parallel = {"--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp"} & given
    if count < 2 or parallel or machine.cpu_quota is not None:
        return []
    if needs and needs.kv_heads % count == 0:
        why = f"{count} NUMA nodes ({'; '.join(machine.nodes)}): a rank on each reads near memory"
        return [Advice(setting=f"--tensor-parallel-size {count}", why=why)]
    cause = f"the model's {needs.kv_heads} KV heads do not divide" if needs else "no model is named"
    why = f"one of {count} NUMA nodes, so that no thread reads far memory ({cause})"
    return [Advice(setting=f"VLLM_CPU_OMP_THREADS_BIND={machine.nodes[0]}", why=why)]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
