"""The end-to-end scenario: tokens per second of a tiny model through vLLM's real engine.

Paged and tagma alternate, each time in a fresh process, because an engine does not unload cleanly
and a process keeps what the first one warmed up. Child processes run ``bench_engine_child.py`` and
answer with one line of JSON.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench.bench_plan import Effort, Planned
from vllm_tagma.lab.bench.bench_timing import Measure, Sample
from vllm_tagma.lab.bench.environment import pinned_cpus
from vllm_tagma.lab.bench.schema import OURS
from vllm_tagma.lab.bench.tiny_model import write_tiny_model

GROUP = "engine"
STOCK = "vllm"
RUNNING = 256
OUTPUT_TOKENS = 128
GENERATIONS = 3
PROCESSES = 5
_TIMEOUT_S = 300
_ANSWER = "tagma-bench-engine "
_BACKEND = {OURS: "tagma", STOCK: "paged"}


class EngineRunError(TagmaError, RuntimeError):
    """A child process that measured an engine failed; the message holds the end of its output."""


def engine_scenarios(effort: Effort, *, cpus: Sequence[int]) -> list[Planned]:
    """One scenario, left out of the quick run. ``cpus``: where the engines may run."""
    return [
        Planned(
            name=f"{GROUP}/tokens_per_second/{RUNNING}",
            group=GROUP,
            title=f"output tokens a second, 2-layer model, {RUNNING} running",
            unit="tokens/s",
            iterations=RUNNING * OUTPUT_TOKENS,
            baseline=STOCK,
            higher_is_better=True,
            target=1.07,
            rounds=PROCESSES,
            quick=False,
            note=(
                f"{RUNNING} prompts of 256 tokens, {OUTPUT_TOKENS} output tokens each; a round is "
                f"a fresh process and its best of {GENERATIONS} generations. The best of them, "
                "since everything else that runs on the machine only ever adds time."
            ),
            open=functools.partial(_open, list(cpus)),
        )
    ]


@contextmanager
def _open(cpus: Sequence[int]) -> Iterator[dict[str, Measure]]:
    with tempfile.TemporaryDirectory(prefix="tagma-bench-") as folder:
        write_tiny_model(Path(folder))
        yield {
            variant: functools.partial(_measure, variant, Path(folder), cpus)
            for variant in (OURS, STOCK)
        }


def _measure(variant: str, model: Path, cpus: Sequence[int]) -> Sample:
    rates = run_child(
        [
            sys.executable,
            "-m",
            "vllm_tagma.lab.bench.bench_engine_child",
            _BACKEND[variant],
            str(model),
        ],
        cpus=cpus,
    )
    return Sample(value=max(rates), counters={"slowest_tokens_per_second": min(rates)})


def run_child(command: Sequence[str], *, cpus: Sequence[int]) -> list[float]:
    """Runs a child on ``cpus`` and returns the rates of its answer.

    Raises:
        EngineRunError: it failed, took longer than five minutes, or gave no answer.
    """
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environment,
            preexec_fn=_affinity(cpus),
        )
    except subprocess.TimeoutExpired:
        raise EngineRunError(f"an engine gave no result within {_TIMEOUT_S} s") from None
    for line in done.stdout.splitlines():
        if done.returncode == 0 and line.startswith(_ANSWER):
            rates: list[float] = json.loads(line.removeprefix(_ANSWER))
            return rates
    output = (done.stdout + done.stderr).strip().splitlines()
    raise EngineRunError(
        f"an engine ended with status {done.returncode} and no result:\n" + "\n".join(output[-15:])
    )


def _affinity(cpus: Sequence[int]) -> Callable[[], None] | None:
    """This process is pinned to one CPU; an engine gets back those it started with."""
    if not cpus or sorted(cpus) == pinned_cpus():
        return None
    return functools.partial(os.sched_setaffinity, 0, set(cpus))


def answer(rates: Sequence[float]) -> str:
    """The line by which a child reports its rates, in tokens per second."""
    return _ANSWER + json.dumps(list(rates))
