"""Forks one process for each engine run, with vLLM imported already.

    python engine_forge.py

Reads one JSON object a line from standard input: ``arguments`` (a script and what it is given),
``environment`` and ``log`` (the file that takes the run's output). Answers each with a line, the
run's exit status, negative for a signal. Ends with its input.

An import of vLLM takes 8 to 10 s of CPU time, and each full garbage collection of an engine's start
another half a second for the objects that it brings: more than a tiny model's whole workload. The
scripts begin with the same import, so what is forked is the process that they would have made of
themselves.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

gc.disable()
from vllm import LLM, SamplingParams  # noqa: E402, F401

gc.enable()


def become(order: dict[str, Any]) -> None:
    """Run the script as ``__main__`` with its environment and its output in the log."""
    os.setsid()  # so that a run which hangs is ended with all it started
    os.environ.clear()
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = order["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    gc.freeze()  # what is imported stays: no collection of a run looks at it
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            return
        print("started", child, flush=True)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
