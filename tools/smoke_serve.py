"""Run `make serve`, paste the curl line it prints, stop it with Ctrl-C's signal, and look around.

Fails unless the answer is a chat completion, the command ends by itself after the signal, and no
process of its own is left. CI runs it; it takes a free port, so it works beside a running server.

    python3 tools/smoke_serve.py [VARIABLE=value ...]      as for make serve
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 1500.0
STOP_SECONDS = 60.0


def main(variables: Sequence[str]) -> int:
    """Serve, ask, stop; returns the exit status."""
    command = ["make", "serve", f"PORT={free_port()}", *variables]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    guard = threading.Timer(READY_SECONDS, process.kill)
    guard.start()
    try:
        line = read_curl_line(process)
        if line is None:
            return fail(f"{' '.join(command)} ended without a curl line")
        answer = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False
        )
        print(f"answer: {answer.stdout}", flush=True)
        text = json.loads(answer.stdout)["choices"][0]["message"]["content"]
        if not text.strip():
            return fail("the answer is empty")
    finally:
        guard.cancel()
        os.killpg(process.pid, signal.SIGINT)
        drain = threading.Thread(target=lambda: print(process.communicate()[0]))
        drain.start()
        drain.join(STOP_SECONDS)
    if drain.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        return fail(f"still running {STOP_SECONDS:.0f} s after the interrupt")
    if left := processes_below(ROOT):
        return fail(f"left behind: {left}")
    print("make serve: answered, stopped, nothing left")
    return 0


def read_curl_line(process: subprocess.Popen[str]) -> str | None:
    """Echo the output up to the curl line; None if the command ended before it."""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("curl "):
            return line.strip()
    return None


def processes_below(root: Path) -> list[str]:
    """Command lines of processes that work in ``root`` and run its .venv or are vLLM's own.

    vLLM's processes rename themselves, so the interpreter's path alone does not find them.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                inside = (entry / "cwd").readlink() == root
            except OSError:
                continue
            if inside and words[0].startswith((str(root / ".venv"), "VLLM::")):
                found.append(" ".join(words))
    return found


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fail(reason: str) -> int:
    """Print why, return 1."""
    print(f"make serve failed its smoke test: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
