"""Prefill on one server, decode on another: one stock, one ours, and transfers in both directions.

So each of our servers has a stock peer. A single stock server says what the tokens are: the stock
one of the two, asked without a transfer and under another salt. A third, stock as well, is there to
be killed. The pools hold 64 blocks, so that many requests at once do not fit.

The model is ``seeded_model.py``'s, for which batching changes no token. ``TAGMA_PD_MODEL`` names
the folder of another one, such as .model/SmolLM2-135M-Instruct: slower, and the same tests.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pd_servers import Server, hang_up, post, proxy_server, vllm_server
from seeded_model import VOCABULARY, write_seeded_model

from prerequisites import require_nixl

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKS = 64
FAILED = "vllm:nixl_num_failed_transfers_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
PULLED = "vllm:nixl_bytes_transferred_sum"
PINNED = "vllm:tagma_pinned_blocks"
PREEMPTED = "vllm:num_preemptions_total"


class Servers(NamedTuple):
    """``to_ours``: a proxy that prefills on the stock server and decodes on ours; ``to_stock``: the
    reverse. ``failed``: transfers that failed on ours before there was a connection."""

    ours: Server
    stock: Server
    spare: Server
    to_ours: Server
    to_stock: Server
    failed: float
    layers: int


@pytest.fixture(scope="module")
def pd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("TAGMA_PD_MODEL"):
        return Path(named)
    folder = tmp_path_factory.mktemp("model")
    write_seeded_model(folder)
    return folder


@pytest.fixture(scope="module")
def servers(
    pd_model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    require_nixl()
    both: dict[str, Any] = {"folder": tmp_path_factory.mktemp("pd"), "env": engine_environment}
    each: dict[str, Any] = {**both, "model": pd_model, "blocks": BLOCKS}
    paged = {"backend": "paged", "connector": "NixlConnector", **each}
    started = []
    try:
        ours = vllm_server("ours", backend="tagma", connector="TagmaNixlConnector", **each)
        started.append(ours)
        for name in ("stock", "spare"):
            started.append(vllm_server(name, **paged))
        _, stock, spare = started
        to_ours = proxy_server(prefill=stock, decode=ours, **both)
        started.append(to_ours)
        to_stock = proxy_server(prefill=ours, decode=stock, **both)
        started.append(to_stock)
        for server in started:
            server.wait()
        for prefill, decode in ((stock, ours), (ours, stock), (spare, ours), (spare, stock)):
            connect(prefill, decode)
        layers = json.loads((pd_model / "config.json").read_text())["num_hidden_layers"]
        yield Servers(ours, stock, spare, to_ours, to_stock, ours.settled()[FAILED], layers)
    finally:
        for server in reversed(started):
            server.stop()


REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


Tokens = list[int]


def words(seed: int, count: int) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


SHARED = words(0, 210)
PROMPTS = {
    "short": words(1, 19),
    "odd": words(2, 289),
    "prefix-a": SHARED + words(3, 96),
    "prefix-b": SHARED + words(4, 169),  # decoders have the shared prefix by now
    "again": SHARED + words(3, 96),  # all of it
    "long": words(5, 687),
}
CROWD = [words(100 + number, 120) for number in range(14)]
"""Four blocks each, which fit at once; with 200 tokens of output they need more than twice as many
as there are."""


def body_of(prompt: Tokens, salt: str, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {**body, "cache_salt": salt, "return_token_ids": True, **more}


def complete(server: Server, prompt: Tokens, salt: str, **more: Any) -> Tokens:
    answer = post(server.port, body_of(prompt, salt, **more))
    assert "choices" in answer, answer
    tokens: Tokens = answer["choices"][0]["token_ids"]
    return tokens


def prefilled(server: Server, prompt: Tokens, salt: str) -> dict[str, Any]:
    """Where a decoder finds the blocks of a prompt that this server has computed."""
    answer = post(
        server.port, body_of(prompt, salt, max_tokens=1, kv_transfer_params=REMOTE_DECODE)
    )
    params: dict[str, Any] = answer["kv_transfer_params"]
    assert params["remote_block_ids"], answer
    return params


def connect(prefill: Server, decode: Server) -> None:
    """Ask until there is an answer for which KV was transferred: vLLM's first handshake gives up
    after five seconds, which a machine with other work takes sometimes."""
    before = decode.metrics().get(PULLED, 0)
    for attempt in range(20):
        prompt, salt = words(6, 40), f"connect {prefill.name} {attempt}"
        complete(decode, prompt, salt, kv_transfer_params=prefilled(prefill, prompt, salt))
        if decode.metrics()[PULLED] > before:
            return
        time.sleep(2)
    raise AssertionError(f"{decode.name} pulls nothing from {prefill.name}")


def test_tokens_are_those_of_a_single_stock_server(servers: Servers) -> None:
    expected = {name: complete(servers.stock, prompt, "alone") for name, prompt in PROMPTS.items()}
    for proxy in (servers.to_ours, servers.to_stock):
        found = {name: complete(proxy, prompt, proxy.name) for name, prompt in PROMPTS.items()}
        assert found == expected, proxy.name
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for proxy in (servers.to_ours, servers.to_stock):
            answers = pool.map(lambda p, to=proxy: complete(to, p, "at once"), PROMPTS.values())
            assert dict(zip(PROMPTS, answers, strict=True)) == expected, proxy.name
    for proxy in (servers.to_ours, servers.to_stock):
        assert "gave no blocks" not in proxy.text()


def test_a_transfer_is_one_descriptor_for_each_run_and_layer(servers: Servers) -> None:
    metrics = servers.ours.settled()
    merged = metrics["vllm:tagma_transfer_merged_total"]
    assert merged >= len(PROMPTS)
    assert metrics["vllm:tagma_transfer_unmerged_total"] == 0
    runs = metrics["vllm:tagma_transfer_runs_total"]
    descriptors = metrics["vllm:tagma_transfer_descriptors_total"]
    assert merged <= runs <= metrics["vllm:tagma_transfer_blocks_total"]
    assert descriptors == runs * servers.layers
    # vLLM's own metrics, which NIXL's telemetry fills, say the same of what was posted.
    assert metrics["vllm:nixl_num_descriptors_sum"] == descriptors
    assert metrics[PULLED] == metrics["vllm:tagma_transfer_bytes_total"]
    assert metrics[FAILED] == servers.failed
    # The spare server's pool is hardly used, so what it sends is one range.
    prompt = PROMPTS["long"]
    params = prefilled(servers.spare, prompt, "runs")
    complete(servers.ours, prompt, "runs", kv_transfer_params=params)
    after = servers.ours.settled()
    grown = {
        name: after[f"vllm:tagma_transfer_{name}_total"]
        - metrics[f"vllm:tagma_transfer_{name}_total"]
        for name in ("blocks", "runs")
    }
    assert grown["blocks"] == len(params["remote_block_ids"][0])
    assert grown["runs"] <= 3


def test_a_second_request_pulls_only_what_the_decoder_has_not(servers: Servers) -> None:
    before = servers.ours.metrics()["vllm:tagma_transfer_blocks_total"]
    complete(servers.to_ours, PROMPTS["prefix-a"], "hits")
    first = servers.ours.metrics()["vllm:tagma_transfer_blocks_total"]
    complete(servers.to_ours, PROMPTS["prefix-b"], "hits")
    second = servers.ours.metrics()["vllm:tagma_transfer_blocks_total"]
    assert first - before > 8, "all of the first prompt"
    assert second - first < (first - before) * 0.9, "the second but for the shared prefix"


def test_blocks_are_pinned_until_the_decoder_has_them(servers: Servers) -> None:
    expired = servers.ours.metrics()[EXPIRED]
    params = prefilled(servers.ours, PROMPTS["odd"], "pinned")
    (blocks,) = params["remote_block_ids"]
    deadline = time.monotonic() + 20
    while servers.ours.metrics()[PINNED] != len(blocks):
        assert time.monotonic() < deadline, "what waits for a decoder is pinned"
        time.sleep(0.1)
    complete(servers.stock, PROMPTS["odd"], "pinned", kv_transfer_params=params)
    assert servers.ours.settled()[EXPIRED] == expired, "given back because the decoder said so"


def test_clients_that_leave_change_nothing(servers: Servers) -> None:
    """On either side of a transfer, of ours and of a stock server: before they are scheduled, while
    their prompt is computed or pulled, and while they decode."""
    salts = (f"leaves {number}" for number in range(100))
    for prefill, decode in ((servers.stock, servers.ours), (servers.ours, servers.stock)):
        jobs = []
        for wait in (0.0, 0.1, 0.7):
            prompt = PROMPTS["odd"]
            # What a prefill server has computed by then is held until its lease ends.
            more = {"max_tokens": 700, "kv_transfer_params": REMOTE_DECODE}
            jobs.append((prefill, body_of(prompt, next(salts), **more), wait))
            salt = next(salts)
            more["kv_transfer_params"] = prefilled(prefill, prompt, salt)
            jobs.append((decode, body_of(prompt, salt, **more), wait))
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(lambda job: hang_up(job[0].port, job[1], seconds=job[2]), jobs))
        expected = complete(servers.stock, PROMPTS["odd"], "alone")
        params = prefilled(prefill, PROMPTS["odd"], "stays")
        found = complete(decode, PROMPTS["odd"], "stays", kv_transfer_params=params)
        assert found == expected, decode.name


def test_a_decoder_that_must_preempt(servers: Servers) -> None:
    def at_once(server: Server, salt: str) -> list[Tokens]:
        with ThreadPoolExecutor(len(CROWD)) as pool:
            return list(pool.map(lambda p: complete(server, p, salt, max_tokens=200), CROWD))

    expected = at_once(servers.stock, "alone")
    before = servers.ours.metrics()
    assert at_once(servers.to_ours, "crowd") == expected
    after = servers.ours.metrics()
    assert after[PREEMPTED] > before[PREEMPTED]
    assert after[PULLED] > before[PULLED]
    assert "gave no blocks" not in servers.to_ours.text()


def test_a_killed_prefill_server(servers: Servers) -> None:
    """A decoder computes what it cannot pull, ours as well as a stock one."""
    decoders = (servers.ours, servers.stock)
    expected = complete(servers.stock, PROMPTS["odd"], "alone")
    asked = [(server, prefilled(servers.spare, PROMPTS["odd"], "killed")) for server in decoders]
    servers.spare.kill()
    failures = []
    for server, params in asked:
        before = server.metrics()[FAILED]
        found = complete(server, PROMPTS["odd"], "killed", kv_transfer_params=params)
        assert found == expected, server.name
        failures.append(server.metrics()[FAILED] - before)
    assert failures[0] == failures[1] > 0, "in ours, in stock"


def test_nothing_is_held_at_the_end(servers: Servers) -> None:
    """Behind all of the above. A prefill whose decode never came is held until its lease ends."""
    for server in (servers.ours, servers.stock):
        server.settled()
    assert servers.ours.metrics()[PINNED] == 0
