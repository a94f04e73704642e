"""Calls a function in a forked process, so that an engine leaves nothing to the next one.

vLLM's engine does not unload cleanly, and a collection of its garbage looks at half a million
objects that the import of vLLM brings: half a second, seven times for each engine. In a fork these
objects are frozen, an engine ends with its process, and what it imports or changes ends with it.
The process that forks must not have run an engine itself: threads do not survive a fork.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class ForkFailure(Exception):
    """The traceback of what was raised, or how the process ended."""


def in_a_fork(call: Callable[..., Any], *arguments: Any) -> Any:
    """What ``call(*arguments)`` returns, as JSON gives it back.

    Raises ForkFailure if it raised, or if its process ended otherwise. The process ends without
    finalisers: a call ends the processes that it started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        try:
            said = {"result": call(*arguments)}
        except BaseException:
            said = {"error": traceback.format_exc()}
        with os.fdopen(sink, "w") as pipe:
            json.dump(said, pipe)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        raise ForkFailure(f"{call.__name__} ended with status {os.waitstatus_to_exitcode(status)}")
    said = json.loads(text)
    if "error" in said:
        raise ForkFailure(said["error"])
    return said["result"]
