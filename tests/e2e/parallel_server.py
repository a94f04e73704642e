"""A server of several processes: how it is started, what it says about itself, what it takes."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from http_server import ONE_THREAD, free_port, wait_until_healthy
from prometheus_client.parser import text_string_to_metric_families

from vllm_tagma.lab.bench_serve.process import Group

POOL_BLOCKS = 320
BLOCK_SIZE = 32
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 16
_FLAGS = {
    "--block-size": BLOCK_SIZE,
    "--kv-cache-memory-bytes": 64 << 20,
    "--max-model-len": MAX_MODEL_LEN,
    "--max-num-seqs": MAX_NUM_SEQS,
    "--max-num-batched-tokens": 512,
    "--dtype": "float32",  # another batch must not change a greedy token
    "--scheduling-policy": "priority",
    "--served-model-name": "model",
    "--seed": 0,
}


class Server:
    """A running server. ``metrics()`` and ``memory()`` may be asked at any time."""

    def __init__(self, group: Group, port: int) -> None:
        self.group = group
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        """Posts ``body`` as JSON; the JSON of the answer."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.loads(response.read())

    def reset(self, *, running_too: bool) -> bool:
        """Empty the prefix cache; with ``running_too`` all running requests are preempted."""
        flag = "true" if running_too else "false"
        answer = self.call(f"/reset_prefix_cache?reset_running_requests={flag}", {})
        return bool(answer["success"])

    def metrics(self, engine: str | None = None) -> dict[str, float]:
        """The figures of vLLM and tagma by name and state, of one engine or summed over all."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                if "part" in labels or "le" in labels or not sample.name.startswith("vllm:"):
                    continue
                if engine is not None and labels.get("engine") != engine:
                    continue
                name = sample.name.removeprefix("vllm:")
                if name.startswith("tagma_") and "state" in labels:
                    name = f"{name}.{labels['state']}"
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def memory(self) -> dict[str, int]:
        """Resident bytes by process title: API server, engine core, one worker per rank."""
        found: dict[str, int] = {}
        parent = psutil.Process(self.group.pid)
        for process in (parent, *parent.children(recursive=True)):
            try:
                title = " ".join(process.cmdline())
                name = "APIServer" if process.pid == parent.pid else _short(title)
                if name:
                    found[name] = found.get(name, 0) + process.memory_info().rss
            except psutil.Error:
                continue
        return found

    def wait_idle(self, seconds: float) -> bool:
        """Whether nothing runs or waits within so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            figures = self.metrics()
            if not figures["num_requests_running"] and not figures["num_requests_waiting"]:
                return True
            time.sleep(0.2)
        return False


def _short(title: str) -> str:
    """``VLLM::Worker_TP0`` -> ``Worker_TP0``; empty for helpers such as resource trackers."""
    return title.partition("VLLM::")[2].split()[0] if "VLLM::" in title else ""


@contextmanager
def serving(
    backend: str, model: Path, log: Path, *flags: str, blocks: int = POOL_BLOCKS
) -> Iterator[Server]:
    """A server with more ``flags`` and a pool of ``blocks`` on a free port; with tagma every step
    is checked.

    Raises ``RuntimeError``, with the end of its log, if it ends or is not ready in time.
    """
    port = free_port()
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(model), "--kv-cache-backend", backend]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--disable-uvicorn-access-log", *flags]
    if backend == "tagma":
        options = {"check_invariants": True, "debug_slots": True}
        command += ["--additional-config", json.dumps({"tagma": options})]
    for flag, value in {**_FLAGS, "--num-gpu-blocks-override": blocks}.items():
        command += [flag, str(value)]
    environment = dict(os.environ)
    environment.update(ONE_THREAD, VLLM_SERVER_DEV_MODE="1")
    environment.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    with Group(command, env=environment, log=log, stop_timeout=60, dies_with_us=True) as group:
        wait_until_healthy(group, port)
        yield Server(group, port)
