"""Time to first token at the decode server: the same prompts to stock and to ours, by turns.

Four servers, one pair of each backend, of which one works at a time. A prompt is asked twice: first
the prefill server computes it, then it has it in its prefix cache, so that what is left is the
transfer and the rest of a request. The decode server never has it: it is asked under another salt
each time.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench.tiny_model import write_tiny_model
from vllm_tagma.lab.bench_transfer.transfer_servers import CONNECTORS, MAX_TOKENS, ServerPair

NUM_BLOCKS: Final = 512
"""Of each server's pool."""

BLOCK_SIZE: Final = 32
"""Tokens; vLLM's attention on a CPU takes multiples of it only."""

_PROMPT = (1000, 2400)  # tokens
_VOCABULARY = 256
_CHURN_TURNS = 2.5  # of the whole pool
_CLIENTS = 12
_KINDS = ("computed", "cached")

Say = Callable[[str], None]


def measure(*, prompts: int, regions: int, seed: int, say: Say) -> dict[str, Any]:
    """``prompts`` prompts in fresh pools, then as many in churned ones.

    Returns the fields of ``transfer_result.Servers``.

    Raises:
        ServerError: a server did not start or answer.
        TagmaError: a prompt was not transferred.
    """
    rng = random.Random(seed)
    stages: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tagma-transfer-") as name, ExitStack() as stack:
        folder = Path(name)
        write_tiny_model(folder, num_hidden_layers=regions)
        say(f"starting four servers with a model of {regions} layers")
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
        pairs = {
            backend: stack.enter_context(
                ServerPair(backend, model=folder, folder=folder / "logs", **sizes)
            )
            for backend in CONNECTORS
        }
        for pair in pairs.values():
            pair.wait()
        for stage in ("fresh", "churned"):
            if stage == "churned":
                say("churning their pools")
                for pair in pairs.values():
                    _churn(pair, seed=seed)
            say(f"{prompts} prompts, {stage} pools")
            stages[stage] = _stage(pairs, stage=stage, prompts=prompts, rng=rng)
    return {
        "blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "prompts": prompts,
        "tokens": list(_PROMPT),
        "stages": stages,
    }


def _stage(
    pairs: Mapping[str, ServerPair], *, stage: str, prompts: int, rng: random.Random
) -> dict[str, Any]:
    before = {backend: pair.counters() for backend, pair in pairs.items()}
    times: dict[str, dict[str, list[float]]] = {
        backend: {f"{kind}_{part}": [] for kind in _KINDS for part in ("prefilled", "token")}
        for backend in pairs
    }
    for number in range(prompts):
        prompt = _prompt(rng, *_PROMPT)
        order = list(pairs) if number % 2 else list(pairs)[::-1]
        for kind in _KINDS:
            for backend in order:
                salt = f"{stage} {number}"
                found = pairs[backend].first_token(
                    prompt, prefill_salt=salt, decode_salt=f"{salt} {kind}"
                )
                times[backend][f"{kind}_prefilled"].append(found.prefilled)
                times[backend][f"{kind}_token"].append(found.token)
    moved = {
        backend: _moved(pair, before[backend], transfers=2 * prompts)
        for backend, pair in pairs.items()
    }
    return {"times_ms": times, "transferred": moved}


def _moved(pair: ServerPair, before: Mapping[str, float], *, transfers: int) -> dict[str, float]:
    """What was transferred since ``before``; a metric may come a moment after the answer."""
    deadline = time.monotonic() + 10
    while True:
        found = {name: value - before[name] for name, value in pair.counters().items()}
        if found["transfers"] == transfers and not found["failed"]:
            return found
        if time.monotonic() > deadline:
            raise TagmaError(f"{pair.backend}: {transfers} prompts, but transferred were {found}")
        time.sleep(0.2)


def _churn(pair: ServerPair, *, seed: int) -> None:
    """Requests of all lengths, many at once, until every block was used more than twice."""
    rng = random.Random(seed)
    jobs = []
    for side in ("prefill", "decode"):
        left = _CHURN_TURNS * NUM_BLOCKS * BLOCK_SIZE
        while left > 0:
            prompt = _prompt(rng, 16, 800)
            body = {"model": "m", "prompt": prompt, "max_tokens": rng.randint(1, 120)}
            jobs.append((side, {**body, "ignore_eos": True, "temperature": 0}))
            left -= len(prompt)
    with ThreadPoolExecutor(2 * _CLIENTS) as pool:
        rng.shuffle(jobs)
        list(pool.map(lambda job: pair.ask(*job), jobs))


def _prompt(rng: random.Random, least: int, most: int) -> list[int]:
    assert most < MAX_TOKENS
    return [rng.randrange(3, _VOCABULARY) for _ in range(rng.randint(least, most))]
