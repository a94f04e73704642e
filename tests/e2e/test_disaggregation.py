"""Prefill on one server, decode on another: one stock, one ours, and transfers in both directions.

So each of our servers has a stock peer. A single stock server says what the tokens are: the stock
one of the two, asked without a transfer and under another salt.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
from pd_servers import Server, post, proxy_server, vllm_server

from prerequisites import require_nixl

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS = 30
FAILED = "vllm:nixl_num_failed_transfers_total"


class Pair(NamedTuple):
    """``to_ours``: a proxy that prefills on the stock server and decodes on ours; ``to_stock``.
    ``failed``: transfers that failed on ours before there was a connection."""

    ours: Server
    stock: Server
    to_ours: Server
    to_stock: Server
    failed: float


@pytest.fixture(scope="module")
def pair(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    require_nixl()
    folder, env = tmp_path_factory.mktemp("pd"), engine_environment
    both: dict[str, Any] = {"folder": folder, "env": env}
    servers = []
    try:
        ours = vllm_server(
            "ours",
            model,
            backend="tagma",
            connector="TagmaNixlConnector",
            policy="recompute",
            **both,
        )
        servers.append(ours)
        stock = vllm_server("stock", model, backend="paged", connector="NixlConnector", **both)
        servers.append(stock)
        to_ours = proxy_server(prefill=stock, decode=ours, **both)
        servers.append(to_ours)
        to_stock = proxy_server(prefill=ours, decode=stock, **both)
        servers.append(to_stock)
        ours.wait(), stock.wait(), to_ours.wait(), to_stock.wait()
        warm_up(to_ours, ours), warm_up(to_stock, stock)
        failed = ours.settled()[FAILED]
        yield Pair(ours, stock, to_ours, to_stock, failed)
    finally:
        for server in reversed(servers):
            server.stop()


def text(topic: str, characters: int) -> str:
    return (topics[topic] * 20)[:characters]


SHARED = text("class", 900)
PROMPTS = {
    "short": text("lambda", 60),
    "odd": text("with", 1_100),
    "prefix-a": SHARED + text("while", 400),
    "prefix-b": SHARED + text("import", 700),  # decoders have the shared prefix by now
    "again": SHARED + text("while", 400),  # all of it
    "long": text("specialnames", 3_000),
}


def complete(server: Server, prompt: str, salt: str, **more: Any) -> list[int]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = post(server.port, {**body, "cache_salt": salt, "return_token_ids": True, **more})
    assert "choices" in answer, answer
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def warm_up(proxy: Server, decode: Server) -> None:
    """Ask until there is an answer for which KV was transferred: vLLM's first handshake gives up
    after five seconds, which a machine with other work takes sometimes."""
    for attempt in range(20):
        body = {"model": "m", "prompt": "Hello there. " * 9, "max_tokens": 2, "temperature": 0}
        answer = post(proxy.port, {**body, "cache_salt": f"warm {attempt}"})
        if "choices" in answer and decode.metrics()["vllm:nixl_bytes_transferred_sum"] > 0:
            return
        time.sleep(2)
    raise AssertionError(f"{proxy.name} has no answer:\n{proxy.text()[-3000:]}")


def test_tokens_are_those_of_a_single_stock_server(pair: Pair) -> None:
    expected = {name: complete(pair.stock, text, "alone") for name, text in PROMPTS.items()}
    for proxy in (pair.to_ours, pair.to_stock):
        found = {name: complete(proxy, text, proxy.name) for name, text in PROMPTS.items()}
        assert found == expected, proxy.name
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for proxy in (pair.to_ours, pair.to_stock):
            answers = pool.map(lambda p, to=proxy: complete(to, p, "at once"), PROMPTS.values())
            assert dict(zip(PROMPTS, answers, strict=True)) == expected, proxy.name
    for proxy in (pair.to_ours, pair.to_stock):
        assert "gave no blocks" not in proxy.text()


def test_a_transfer_is_one_descriptor_for_each_run_and_layer(pair: Pair) -> None:
    metrics = pair.ours.settled()
    merged = metrics["vllm:tagma_transfer_merged_total"]
    assert merged >= len(PROMPTS)
    assert metrics["vllm:tagma_transfer_unmerged_total"] == 0
    runs = metrics["vllm:tagma_transfer_runs_total"]
    descriptors = metrics["vllm:tagma_transfer_descriptors_total"]
    assert merged <= runs < metrics["vllm:tagma_transfer_blocks_total"] / 2
    assert descriptors == runs * LAYERS
    # vLLM's own metrics, which NIXL's telemetry fills, say the same of what was posted.
    assert metrics["vllm:nixl_num_descriptors_sum"] == descriptors
    assert metrics["vllm:nixl_bytes_transferred_sum"] == metrics["vllm:tagma_transfer_bytes_total"]
    assert metrics[FAILED] == pair.failed


def test_a_second_request_pulls_only_what_the_decoder_has_not(pair: Pair) -> None:
    before = pair.ours.metrics()["vllm:tagma_transfer_blocks_total"]
    complete(pair.to_ours, PROMPTS["prefix-a"], "hits")
    first = pair.ours.metrics()["vllm:tagma_transfer_blocks_total"]
    complete(pair.to_ours, PROMPTS["prefix-b"], "hits")
    second = pair.ours.metrics()["vllm:tagma_transfer_blocks_total"]
    assert first - before > 8, "all of the first prompt"
    assert second - first < (first - before) * 0.9, "the second but for the shared prefix"


def abort(server: Server, body: dict[str, Any], *, seconds: float) -> None:
    """Ask for a stream and hang up after some time."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
    time.sleep(seconds)
    connection.close()


def test_nothing_is_held_after_aborts(pair: Pair) -> None:
    body = {"model": "m", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    jobs = [
        (proxy, {**body, "prompt": text("specialnames", 3_000), "cache_salt": f"abort {n}"}, wait)
        for proxy in (pair.to_ours, pair.to_stock)
        for n, wait in enumerate((0.05, 0.4, 1.5, 3.0))
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: abort(job[0], job[1], seconds=job[2]), jobs))
    # A prefill whose decode never came is held until its lease ends, as in stock.
    pair.ours.settled(), pair.stock.settled()
    expected = complete(pair.stock, PROMPTS["odd"], "alone")
    assert complete(pair.to_ours, PROMPTS["odd"], "after aborts") == expected
    assert complete(pair.to_stock, PROMPTS["odd"], "after aborts") == expected
    pair.ours.settled(), pair.stock.settled()


def test_a_killed_prefill_server(pair: Pair) -> None:
    """Last, since it is gone afterwards: the decoder computes what it cannot pull."""
    expected = complete(pair.stock, PROMPTS["odd"], "alone")
    body = {"model": "m", "prompt": PROMPTS["odd"], "cache_salt": "killed", "max_tokens": 8}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = post(pair.stock.port, {**body, "max_tokens": 1, "kv_transfer_params": remote})
    params = answer["kv_transfer_params"]
    assert params["remote_block_ids"]
    failed = pair.ours.metrics()[FAILED]
    pair.stock.kill()
    answer = post(pair.ours.port, {**body, "kv_transfer_params": params})
    assert "choices" in answer, answer
    assert answer["choices"][0]["token_ids"] == expected
    assert pair.ours.metrics()[FAILED] > failed
    # The proxy goes on without the server that is gone.
    assert complete(pair.to_ours, PROMPTS["odd"], "without prefill") == expected
    assert "gave no blocks" in pair.to_ours.text()
    pair.ours.settled()
