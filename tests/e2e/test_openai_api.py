"""``vllm serve --kv-cache-backend tagma`` as a user starts it: plugin by entry point."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_server import free_port, wait_until_healthy
from prometheus_client.parser import text_string_to_metric_families

from vllm_tagma.lab.bench_serve.process import Group

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return str(response.read().decode())


def tagma_map(port: int, *options: str) -> subprocess.CompletedProcess[str]:
    tagma = Path(sys.executable).with_name("tagma")
    command = [str(tagma), "map", f"http://127.0.0.1:{port}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def check_metrics(port: int, metrics: str) -> None:
    """After three requests, one at a time, whose prefixes grew: nothing runs any more."""
    found = {
        (
            sample.name.removeprefix("vllm:tagma_"),
            sample.labels.get("state", sample.labels.get("le")),
        ): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.startswith("vllm:tagma_") and "part" not in sample.labels
    }
    assert found["request_ranges_count", None] == found["request_ranges_bucket", "4.0"] == 3
    assert found["requests", None] == found["pool_blocks", "live"] == 0
    assert found["one_range_perc", None] == 1
    assert found["cap_refusals_total", None] == 0
    shown = tagma_map(port)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("engine 0 ")
    (engine,) = json.loads(tagma_map(port, "--json").stdout)["engines"]
    assert engine["model"] == "smollm2"
    assert engine["cached"] > 0, "the conversation stays in the cache"
    assert engine["cached"] + engine["hole"] == engine["blocks"]
    assert sum(cached for _, cached, _ in engine["parts"]) == engine["cached"]


def check_paged_map(port: int, metrics: str) -> None:
    shown = tagma_map(port)
    assert shown.returncode == 1
    assert "on the paged backend" in shown.stderr


@contextmanager
def serving(
    backend: str, model: Path, environment: dict[str, str], folder: Path
) -> Iterator[tuple[int, Path]]:
    """A server on a free port, and its log."""
    port = free_port()
    log = folder / f"{backend}.log"
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(model), "--kv-cache-backend", backend, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "1024"]
    command += [
        "--block-size",
        "32",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        str(256 << 20),
        "--seed",
        "0",
    ]
    command += ["--served-model-name", "smollm2", "--enable-prompt-tokens-details"]
    with Group(command, env=environment, log=log, stop_timeout=60) as group:
        wait_until_healthy(group, port)
        yield port, log


def conversation(port: int) -> list[tuple[str, int]]:
    """Three turns over one history: (answer, cached prompt tokens) of each."""
    messages = [{"role": "system", "content": "You answer in one sentence. " * 20}]
    turns = []
    for question in ("Why is the sky blue?", "And at sunset?", "And on Mars?"):
        messages.append({"role": "user", "content": question})
        answer = post(
            port,
            "/v1/chat/completions",
            {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24},
        )
        text = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        turns.append((text, (answer["usage"]["prompt_tokens_details"] or {})["cached_tokens"]))
    return turns


def test_chat_over_http_equals_paged(
    model: Path, engine_environment: dict[str, str], tmp_path: Path
) -> None:
    seen = {}
    for backend in ("paged", "tagma"):
        with serving(backend, model, engine_environment, tmp_path) as (port, log):
            seen[backend] = conversation(port)
            assert ("KV-cache backend tagma" in log.read_text()) == (backend == "tagma")
            metrics = fetch(port, "/metrics")
            assert "vllm:kv_cache_usage_perc" in metrics
            assert ("vllm:tagma_" in metrics) == (backend == "tagma")
            (check_metrics if backend == "tagma" else check_paged_map)(port, metrics)
            # Our figures travel in a dict of KV fetches; vLLM's logger must not see them there.
            assert "KV fetch" not in log.read_text()
    assert seen["tagma"] == seen["paged"]
    assert all(text for text, _ in seen["tagma"])
    assert seen["tagma"][-1][1] > 0, "the third turn must hit the first two"
