"""A server under test as a child process: a port, and when it answers."""

from __future__ import annotations

import socket
import time
import urllib.request

from vllm_tagma.lab.bench_serve.process import Group

READY_SECONDS = 400

ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""For workers that share cores: threads that spin for each other collapse as soon as anything else
runs."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(group: Group, port: int) -> None:
    """Return when ``/health`` answers.

    Raises ``RuntimeError``, with the end of the log, if the server ends or is not ready in time.
    """
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        except OSError:  # an error of urllib is one as well
            if group.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{group.log.stem} did not start:\n{group.tail(60)}") from None
        time.sleep(0.5)
