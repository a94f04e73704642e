"""Child processes that end with us: a group of their own, stopped whole, in whichever way we end.

vLLM's server starts an engine and workers. They share its process group, so that a signal to the
group reaches those that the server itself can no longer stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_GROUP_SECONDS = 5.0
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 64 << 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked this process to end. ``number``: which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise :class:`Interrupted` in the main thread inside.

    One that is ignored stays so: ``nohup`` is how a run outlives its terminal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Group:
    """A running command whose output goes to a log; a context manager that stops it.

    ``dies_with_us``: the operating system sends it SIGTERM should this process be killed outright.
    That needs code between fork and exec, which is safe only while no other thread runs here.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        stop_timeout: float,
        dies_with_us: bool = False,
    ) -> None:
        self.log = log
        self._stop_timeout = stop_timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()) if dies_with_us else None,
            )

    @property
    def pid(self) -> int:
        """Of the command, and of its process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM to the command, time to end in good order, then SIGKILL to the whole group.

        Interrupted again meanwhile, it kills at once and hands the interruption on.
        """
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=self._stop_timeout)
            deadline = time.monotonic() + _GROUP_SECONDS
            while _is_alive(self.pid) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        return tail(self.log, lines=lines)


def tail(path: Path, *, lines: int) -> str:
    """The last lines of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _die_with_parent(parent: int):  # type: ignore[no-untyped-def]
    def before_exec() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
