"""Runs a script with an engine in a process of its own, forked from one that has imported vLLM.

    run = run_script("engine_run.py", backend, model, out, environment=env, timeout=900)
    assert run.returncode == 0, run.stdout[-6000:]

What Python and its libraries read while they are imported makes an environment of its own
(``_READ_AT_IMPORT``). For each there is one forge (``engine_forge.py``), started when it is first
asked for, and ended with the tests.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent

# Of these the process has what it was started with: their values are part of a forge's name.
_READ_AT_IMPORT = (
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "TRITON_INTERPRET",
    "VLLM_LOGGING_LEVEL",
    "VLLM_USE_V2_MODEL_RUNNER",
)


class _Forge:
    """A process that forks runs. One run at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        # Threads of OpenBLAS would have to survive a fork.
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_forge.py")],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[list[str]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("started ", "ended ")):  # the import may print as well
                self._lines.put(line.split())
        self._lines.put(["gone", "1"])

    def run(
        self, arguments: list[str], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as log:
            order = {"arguments": arguments, "environment": environment, "log": log.name}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            said, value = self._lines.get(timeout=300)  # the first run waits for the import
            assert said == "started", f"the process that forks {arguments} ended"
            child = int(value)
            try:
                said, value = self._lines.get(timeout=timeout)
            except queue.Empty:
                os.killpg(child, signal.SIGKILL)
                self._lines.get(timeout=60)
                raise subprocess.TimeoutExpired(arguments, timeout, output=log.read()) from None
            assert said == "ended", f"the process that forked {arguments} ended before it"
            return subprocess.CompletedProcess(arguments, int(value), stdout=log.read())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


_forges: dict[tuple[str | None, ...], _Forge] = {}


def run_script(
    script: str, *arguments: object, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """The exit status and the output of ``script``, a file of this folder, with ``arguments``.

    Raises ``subprocess.TimeoutExpired``; the run has been killed then, with all that it started.
    """
    name = tuple(environment.get(variable) for variable in _READ_AT_IMPORT)
    if name not in _forges:
        _forges[name] = _Forge(environment)
    command = [str(HERE / script), *map(str, arguments)]
    return _forges[name].run(command, environment, timeout)


@atexit.register
def _end_all() -> None:
    for forge in _forges.values():
        forge.end()
