"""A prefill and a decode server of one backend, as child processes, and what one prompt takes them.

The model is a Llama of random weights with one layer for each region, so that a prompt's KV has as
many regions as the transfers that are posted without servers.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench_serve import serve_metrics
from vllm_tagma.lab.bench_serve.process import Group

CONNECTORS = {"paged": "NixlConnector", "tagma": "TagmaNixlConnector"}
"""Backend of both servers -> connector of both."""

MAX_TOKENS = 4096
"""Prompt and output of a request."""

_READY_SECONDS = 400.0
_ANSWER_SECONDS = 300.0
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_COUNTERS = {
    "transfers": "vllm:nixl_bytes_transferred_count",
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "descriptors": "vllm:nixl_num_descriptors_sum",
    "post_seconds": "vllm:nixl_post_time_seconds_sum",
    "transfer_seconds": "vllm:nixl_xfer_time_seconds_sum",
    "failed": "vllm:nixl_num_failed_transfers_total",
}


class ServerError(TagmaError, RuntimeError):
    """A server that did not start or did not answer as it should."""


class FirstToken(NamedTuple):
    """Milliseconds from the request's start: to the prefill server's answer, and to the first token
    of the decode server."""

    prefilled: float
    token: float


class ServerPair:
    """Two ``vllm serve`` with NIXL between them; a context manager that stops them."""

    def __init__(
        self, backend: str, *, model: Path, folder: Path, num_blocks: int, block_size: int
    ) -> None:
        """Starts both, and returns at once. ``model`` holds a configuration alone."""
        self.backend = backend
        self._ports = {side: _free_port() for side in ("prefill", "decode")}
        self._groups: dict[str, Group] = {}
        for side, port in self._ports.items():
            self._groups[side] = Group(
                _command(
                    backend, model=model, port=port, num_blocks=num_blocks, block_size=block_size
                ),
                env={**os.environ, **_environment()},
                log=folder / f"{backend}-{side}.log",
                stop_timeout=30,
                dies_with_us=True,
            )

    def __enter__(self) -> ServerPair:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.stop()

    def wait(self) -> None:
        """Return once both answer and a transfer has gone through.

        Raises:
            ServerError: one ended or is not ready in time.
        """
        deadline = time.monotonic() + _READY_SECONDS
        for side, group in self._groups.items():
            while not serve_metrics.is_healthy(self._base(side)):
                if group.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"{group.log.stem} did not start:\n{group.tail(80)}")
                time.sleep(0.5)
        # vLLM's first handshake gives up after five seconds, which a busy machine needs sometimes.
        for attempt in range(20):
            self.first_token([5] * 100, prefill_salt=f"hello {attempt}", decode_salt="hello")
            if self.counters()["transfers"]:
                return
            time.sleep(1)
        raise ServerError(f"{self.backend}: the decode server pulls nothing")

    def first_token(self, prompt: list[int], *, prefill_salt: str, decode_salt: str) -> FirstToken:
        """Ask as a router does: the prefill server, then the decode server with its answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        begin = time.perf_counter()
        answer = self.ask(
            "prefill", {**body, "cache_salt": prefill_salt, "kv_transfer_params": _REMOTE_DECODE}
        )
        prefilled = time.perf_counter()
        params = answer["kv_transfer_params"]
        self.ask("decode", {**body, "cache_salt": decode_salt, "kv_transfer_params": params})
        token = time.perf_counter()
        return FirstToken(1e3 * (prefilled - begin), 1e3 * (token - begin))

    def ask(self, side: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of one of the two. Raises ``ServerError`` for any but a good one."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._ports[side], timeout=_ANSWER_SECONDS
        )
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except OSError as error:
            raise ServerError(f"{self._groups[side].log.stem}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError(f"{self._groups[side].log.stem}, {response.status}: {text[:500]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def counters(self) -> dict[str, float]:
        """What the decode server has transferred so far."""
        found = serve_metrics.parse(serve_metrics.fetch(self._base("decode")) or "")
        return {name: found.get(metric) or 0.0 for name, metric in _COUNTERS.items()}

    def _base(self, side: str) -> str:
        return serve_metrics.base_url("127.0.0.1", self._ports[side])


def _command(
    backend: str, *, model: Path, port: int, num_blocks: int, block_size: int
) -> list[str]:
    shape = json.loads((model / "config.json").read_text())
    per_token = 2 * 4 * shape["num_key_value_heads"] * shape["head_dim"]
    num_bytes = shape["num_hidden_layers"] * per_token * num_blocks * block_size
    transfer = {"kv_connector": CONNECTORS[backend], "kv_role": "kv_both"}
    return [
        *(str(Path(sys.executable).with_name("vllm")), "serve", str(model)),
        *("--served-model-name", "m", "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--kv-cache-backend", backend, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--seed", "0", "--enforce-eager", "--block-size", str(block_size)),
        *("--max-model-len", str(MAX_TOKENS), "--kv-cache-memory-bytes", str(num_bytes)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]


def _environment() -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_TLS": os.environ.get("UCX_TLS", "tcp,self,sm"),
        # Two idle threads that spin for each other would take what the other servers need.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
