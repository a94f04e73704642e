"""``vllm serve`` that transfer KV to each other, for ``test_disaggregation.py``."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from http_server import ONE_THREAD, free_port, wait_until_healthy
from prometheus_client.parser import text_string_to_metric_families

from vllm_tagma.lab.bench_serve.process import Group


def post(
    port: int, body: dict[str, Any], *, path: str = "/v1/completions", timeout: float = 300
) -> dict[str, Any]:
    """The answer's body; an error's has ``error`` in it."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer: dict[str, Any] = json.loads(response.read())
    except urllib.error.HTTPError as error:
        answer = {"error": error.code, "text": error.read().decode()}
    return answer


def hang_up(port: int, body: dict[str, Any], *, seconds: float) -> None:
    """Ask for a stream and close the connection after some time, whatever came by then."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
    time.sleep(seconds)
    connection.close()


class Server:
    """A child process that serves; ``wait`` for it, ``stop`` or ``kill`` it."""

    def __init__(
        self, name: str, command: list[str], *, port: int, log: Path, env: dict[str, str]
    ) -> None:
        self.name, self.port = name, port
        self.group = Group(command, env=env, log=log, stop_timeout=30)

    def wait(self) -> None:
        """Return when it is ready."""
        wait_until_healthy(self.group, self.port)

    def text(self) -> str:
        """Its output so far."""
        return self.group.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels; ``_bucket`` left out."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def settled(self, seconds: float = 120) -> dict[str, float]:
        """Its metrics, as soon as no block is in use any more; then none is pinned either."""
        deadline = time.monotonic() + seconds
        while (found := self.metrics())["vllm:kv_cache_usage_perc"] > 0:
            assert time.monotonic() < deadline, f"{self.name} still holds blocks: {found}"
            time.sleep(0.5)
        assert found.get("vllm:tagma_pinned_blocks", 0) == 0, f"{self.name} has pins left"
        return found

    def kill(self) -> None:
        """End it at once, with everything it started."""
        os.killpg(self.group.pid, signal.SIGKILL)
        while self.group.poll() is None:
            time.sleep(0.05)

    def stop(self) -> None:
        """End it in order, if it runs."""
        self.group.stop()


def vllm_server(
    name: str,
    *,
    model: Path,
    backend: str,
    connector: str,
    folder: Path,
    env: dict[str, str],
    blocks: int,
) -> Server:
    """``vllm serve`` with a pool of ``blocks`` blocks of 32 tokens; what it fails to load, it
    computes."""
    port = free_port()
    transfer = {"kv_connector": connector, "kv_role": "kv_both"}
    transfer["kv_load_failure_policy"] = "recompute"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--kv-cache-backend", backend, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--enforce-eager", "--max-model-len", "1024", "--block-size", "32"]
    command += ["--dtype", "float32", "--seed", "0", "--served-model-name", "m"]
    shape = json.loads((model / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    # K and V, numbers of 4 bytes, 32 tokens.
    per_layer = 2 * 4 * 32 * shape["num_key_value_heads"] * head
    size = blocks * shape["num_hidden_layers"] * per_layer
    command += ["--kv-cache-memory-bytes", str(size)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    own = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,self,sm",
        **ONE_THREAD,
    }
    return Server(name, command, port=port, log=folder / f"{name}.log", env={**env, **own})


def proxy_server(*, prefill: Server, decode: Server, folder: Path, env: dict[str, str]) -> Server:
    """The proxy of ``make pd`` in front of two servers."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_tagma.lab.pd.pd_proxy", "--port", str(port)]
    command += ["--prefill", f"http://127.0.0.1:{prefill.port}"]
    command += ["--decode", f"http://127.0.0.1:{decode.port}"]
    name = f"proxy-{prefill.name}-{decode.name}"
    return Server(name, command, port=port, log=folder / f"{name}.log", env=env)
