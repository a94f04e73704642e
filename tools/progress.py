"""Numbered steps with elapsed time, and commands that run quietly but visibly.

Everything `make` does before the package is installed goes through here, so that a user always sees
which step runs, for how long, and on failure one paragraph plus the end of the log. Standard
library only: nothing is installed yet when this runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HEARTBEAT_SECONDS = 15.0
LOG_TAIL_LINES = 15


class SetupFailure(Exception):
    """A step failed; the text is the whole message for the user: what, value, limit, way out."""


class CommandFailure(Exception):
    """A command ended with a nonzero status; ``log`` is its combined output."""

    def __init__(self, *, command: Sequence[str], status: int, log: str) -> None:
        super().__init__(f"{' '.join(command)} ended with status {status}")
        self.command = list(command)
        self.status = status
        self.log = log

    def tail(self) -> str:
        """The last lines of the output, indented for a message."""
        lines = [line for line in self.log.splitlines() if line.strip()][-LOG_TAIL_LINES:]
        return "\n".join(f"    | {line}" for line in lines)


class Progress:
    """Prints ``[2/6] title ... done in 3.1 s`` and the live state of the command under way."""

    def __init__(self, *, total: int, log_dir: Path) -> None:
        self._total = total
        self._number = 0
        self._log_dir = log_dir
        self._terminal = sys.stdout.isatty()
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print one indented line below the current step."""
        print(f"      {text}", flush=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Frame one numbered step; prints its time when it ends well."""
        self._number += 1
        print(f"[{self._number}/{self._total}] {title}", flush=True)
        started = time.monotonic()
        yield
        print(f"      done in {time.monotonic() - started:.1f} s", flush=True)

    def skip(self, title: str, reason: str) -> None:
        """Count a step that has nothing to do."""
        self._number += 1
        print(f"[{self._number}/{self._total}] {title}: {reason}", flush=True)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        log_name: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run ``command``, keep its output in a log, show its last line live; return the output.

        Raises CommandFailure on a nonzero status. On Ctrl-C the command is stopped first.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._log_dir / f"{log_name}.log"
        words = [str(word) for word in command]
        started = time.monotonic()
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=dict(env) if env is not None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        lines: list[str] = []
        reader = threading.Thread(target=self._copy, args=(process, log_path, lines), daemon=True)
        reader.start()
        beat = started
        try:
            while reader.is_alive():
                reader.join(timeout=0.2 if self._terminal else 1.0)
                now = time.monotonic()
                if self._terminal:
                    self._show(lines, now - started)
                elif now - beat >= HEARTBEAT_SECONDS:
                    beat = now
                    self.say(f"... {now - started:.0f} s: {_last(lines, width=90)}")
            status = process.wait()
        except BaseException:
            stop_group(process, grace_seconds=5.0)
            raise
        finally:
            if self._terminal:
                print("\r\033[K", end="", flush=True)
        if status != 0:
            raise CommandFailure(command=words, status=status, log="".join(lines))
        return "".join(lines)

    def _copy(self, process: subprocess.Popen[str], log_path: Path, lines: list[str]) -> None:
        assert process.stdout is not None
        with log_path.open("w", encoding="utf-8") as log:
            for line in process.stdout:
                lines.append(line)
                log.write(line)
                log.flush()

    def _show(self, lines: list[str], seconds: float) -> None:
        width = shutil.get_terminal_size().columns - 16
        print(f"\r\033[K      {seconds:4.0f} s {_last(lines, width=width)}", end="", flush=True)


def _last(lines: list[str], *, width: int) -> str:
    for line in reversed(lines[-50:]):
        # pip's warnings are kept in the log; the line that says what it does is worth more here.
        if line.strip() and not line.startswith("WARNING:"):
            return line.strip().replace("\r", " ")[: max(width, 10)]
    return ""


def stop_group(process: subprocess.Popen[str], *, grace_seconds: float) -> None:
    """End a process started with ``start_new_session`` and everything it started.

    Sends SIGTERM to its group, waits, then SIGKILL to what is left of the group.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
