"""Two engines behind one address: each with a pool of its own, and with figures of its own.

Requests are pinned to an engine by vLLM's header. The same prompts on stock and on tagma have to
give the same tokens and the same prefix hits, which an engine finds in its own pool only.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from parallel_server import BLOCK_SIZE, Server, serving
from seeded_model import write_seeded_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

SHARED_BLOCKS = 4
FLAGS = ("--data-parallel-size", "2", "--enable-prompt-tokens-details")


def ask(server: Server, engine: int, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
    """Tokens and cached prompt tokens of one request, served by that engine."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = server.call("/v1/completions", body, **{"X-data-parallel-rank": str(engine)})
    details: dict[str, int] = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def workload(server: Server) -> dict[str, Any]:
    """A prefix on each engine in turn, then its continuations on both at the same time."""
    shared = [3 + at * 37 % 500 for at in range(SHARED_BLOCKS * BLOCK_SIZE)]
    found: dict[str, Any] = {}
    for engine in (0, 1):
        for turn in ("first", "second"):
            found[f"{turn} on {engine}"] = ask(server, engine, [*shared, 7, 8, 9], 4)
    jobs = [(engine, number) for number in range(6) for engine in ((0, 1) if number < 4 else (1,))]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = pool.map(
            lambda job: ask(server, job[0], [*shared, 50 + job[1], *range(3, 40)], 40), jobs
        )
        found |= {
            f"{number} on {engine}": a for (engine, number), a in zip(jobs, answers, strict=True)
        }
    return found


def test_engines_answer_as_stock_does_and_are_told_apart(tmp_path: Path) -> None:
    write_seeded_model(tmp_path)
    found = {}
    for backend in ("paged", "tagma"):
        with serving(backend, tmp_path, tmp_path / f"{backend}.log", *FLAGS) as server:
            found[backend] = workload(server)
            time.sleep(0.5)
            engines = [server.metrics(engine) for engine in ("0", "1")]
    assert found["tagma"] == found["paged"]
    hits = {name: cached for name, (_, cached) in found["tagma"].items()}
    assert hits["first on 0"] == hits["first on 1"] == 0, "an engine has its own pool"
    assert set(hits.values()) == {0, SHARED_BLOCKS * BLOCK_SIZE}
    for engine, requests in zip(engines, (6, 8), strict=True):
        assert engine["tagma_request_ranges_count"] == requests
        assert engine["tagma_requests"] == engine["tagma_pool_blocks.live"] == 0
        assert engine["tagma_pool_blocks.cached"] >= SHARED_BLOCKS
        blocks = sum(engine[f"tagma_pool_blocks.{s}"] for s in ("live", "cached", "hole"))
        assert blocks > engine["tagma_pool_blocks.cached"]
    logs = (tmp_path / "tagma.log").read_text()
    assert logs.count("KV-cache backend tagma") == 2
