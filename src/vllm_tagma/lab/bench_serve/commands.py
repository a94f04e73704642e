"""The command lines of a series: ``vllm serve`` for a backend, ``vllm bench serve`` for a stage.

The client is vLLM's own. It reads each stage's requests from a JSON Lines file that this package
wrote before (``--dataset-name custom``): its ``sharegpt`` loader drops every prompt above 1,024
tokens, so it could not fill a context of 16K, and a file of our own makes the requests and their
order the same in every run by construction.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from vllm_tagma.lab.bench_serve.serve_plan import KERNELS, Run, Stage
from vllm_tagma.lab.bench_serve.serve_settings import Settings

MODEL_NAME = "bench"
SCOPES = "vllm_tagma.lab.bench_serve.scopes.WorkerScopes"
_DRAIN_SECONDS = 3  # for running requests; with 0, vLLM kills its engine and logs a traceback


def vllm_words(settings: Settings) -> list[str]:
    """The words that run vLLM: ``--vllm-command``, else the script beside this Python, else PATH.

    The last is returned even if it does not exist; ``preflight`` says so.
    """
    if settings.vllm_command:
        return shlex.split(settings.vllm_command)
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside) if beside.exists() else shutil.which("vllm") or "vllm"]


def server_command(settings: Settings, *, run: Run, traces: Path) -> list[str]:
    """``vllm serve`` of a run; ``traces`` is where a recorded run writes its trace.

    The user's flags come last, so that they override ours.
    """
    command = [*vllm_words(settings), "serve", settings.model, "--served-model-name", MODEL_NAME]
    command += ["--host", settings.host, "--port", str(settings.port)]
    command += ["--kv-cache-backend", run.backend, "--seed", str(settings.seed)]
    command += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    command += ["--shutdown-timeout", str(_DRAIN_SECONDS)]
    # Sampled twice a second or so: one line each would bury what matters in the log.
    command += ["--disable-access-log-for-endpoints", "/metrics,/health"]
    if settings.block_size:
        command += ["--block-size", str(settings.block_size)]
    if settings.kv_cache_memory_bytes:
        command += ["--kv-cache-memory-bytes", str(settings.kv_cache_memory_bytes)]
    if settings.enforce_eager:
        command += ["--enforce-eager"]
    if settings.device == "cuda":
        command += ["--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"]
    if run.pair is None:
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
            "max_iterations": settings.profile_steps,
        }
        command += ["--profiler-config", json.dumps(profiler), "--worker-extension-cls", SCOPES]
    own = {"paged": settings.paged_args, "tagma": settings.tagma_args}[run.backend]
    return command + shlex.split(settings.server_args) + shlex.split(own)


def client_command(
    settings: Settings, *, stage: Stage, requests: Path, result: Path, num_requests: int
) -> list[str]:
    """``vllm bench serve`` of a stage: reads ``requests``, writes ``result``."""
    command = [*vllm_words(settings), "bench", "serve", "--backend", "openai"]
    command += ["--host", settings.host, "--port", str(settings.port)]
    command += ["--model", MODEL_NAME, "--tokenizer", settings.model]
    command += ["--dataset-name", "custom", "--dataset-path", str(requests)]
    command += ["--custom-output-len", "-1", "--skip-chat-template"]
    command += ["--disable-shuffle", "--no-oversample", "--num-prompts", str(num_requests)]
    command += ["--temperature", "0", "--seed", str(settings.seed)]
    command += ["--request-id-prefix", f"{stage.name}-"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
    command += ["--save-result", "--save-detailed", "--disable-tqdm"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    if stage.concurrency is not None:
        command += ["--max-concurrency", str(stage.concurrency)]
    if stage.rate is not None:
        command += ["--request-rate", f"{stage.rate:g}"]
    if settings.ignore_eos:
        command += ["--ignore-eos"]
    if stage.kind == KERNELS:
        command += ["--profile"]
    return command


def environment(settings: Settings, *, run: Run | None = None) -> dict[str, str]:
    """Environment of servers and clients; :func:`own_variables` on top of this process's."""
    return {**os.environ, **own_variables(settings, run=run)}


def own_variables(settings: Settings, *, run: Run | None = None) -> dict[str, str]:
    """What the benchmark sets itself, as printed by ``--dry-run`` and recorded."""
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if settings.device == "cpu":
        # A pair of spinning OpenMP threads collapses as soon as anything else runs.
        variables["OMP_NUM_THREADS"] = str(settings.omp_threads)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if run is not None and run.pair is None:
        variables["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"
    return variables
