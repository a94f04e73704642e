"""`make serve`: from a fresh clone to a chat request that is answered, in one command.

Checks what can be checked in a second (port, model name, compiler, memory, disk), then builds the
environment and the model as numbered steps, then runs `vllm serve` on the tagma backend as a child
process and prints one curl line when it is ready. The child is stopped with everything it started
when this process ends, in whichever way it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import default_model
import host
from environment import Environment
from models import Model, resolve
from progress import Progress, SetupFailure

ROOT = Path(__file__).resolve().parent.parent
# Measured with the default model: API server and engine core together, without weights and KV.
RUNTIME_BYTES = 5 * host.GIB // 2
MIN_KV_BYTES = host.GIB // 4
MAX_KV_BYTES = 4 * host.GIB
DRAIN_SECONDS = 3  # for running requests; with 0, vLLM kills its engine and logs a traceback
STOP_SECONDS = 15.0
GROUP_SECONDS = 3.0
PR_SET_PDEATHSIG = 1


class Interrupted(Exception):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__)
    parser.add_argument("--model", default="", help="folder or hub id; default: the built-in model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="8000")
    parser.add_argument("--args", default="", help="further flags of vllm serve, as one string")
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        return serve(options)
    except SetupFailure as failure:
        print(f"\nmake serve failed.\n{failure}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"\nstopped ({interrupted})", flush=True)
        return 128 + interrupted.number


def serve(options: argparse.Namespace) -> int:
    """Check, build, serve. Raises SetupFailure or Interrupted."""
    extra = split_args(options.args)
    port = host.check_port(host=options.host, port_text=options.port)
    model = resolve(text=options.model, root=ROOT)
    host.check_platform()
    host.check_compiler()
    cuda = host.wants_cuda()
    # Measured on a CPU with AVX2 only: a bfloat16 prefill takes 7 times as long as a float32 one.
    dtype = "bfloat16" if host.has_bfloat16() else "float32"
    kv_bytes = 0
    if not cuda:
        kv_bytes = kv_cache_bytes(
            model=model, available=host.available_memory(), widened=dtype == "float32"
        )
    if not cuda and host.has_cuda():
        print(
            "An NVIDIA GPU was found. The GPU path of the tagma backend has not been proven yet, "
            "so this serves on the CPU; TAGMA_CUDA=1 make serve tries the GPU.",
            flush=True,
        )
    progress = Progress(total=5, log_dir=ROOT / "build" / "logs")
    environment = Environment(root=ROOT, progress=progress, cuda=cuda)
    if not environment.folder.exists():
        need = host.NEED_DISK_CUDA if cuda else host.NEED_DISK_CPU
        host.check_disk(folder=ROOT, need_bytes=need)
    environment.create()
    environment.install_vllm()
    environment.install_plugin()
    provide_model(model, environment)
    command = serve_command(
        vllm=environment.folder / "bin" / "vllm",
        model=model,
        host_name=options.host,
        port=port,
        kv_bytes=kv_bytes,
        dtype=dtype,
        extra=extra,
    )
    # Installing may have taken minutes: ask again, so that the message stays ours.
    host.check_port(host=options.host, port_text=options.port)
    with progress.step("vLLM (ready in about half a minute)"):
        progress.say(shlex.join(command))
        process = start(command, environment.env)
        try:
            wait_until_ready(process, host_name=options.host, port=port)
        except BaseException:
            stop(process)
            raise
    line = curl_line(model=model, host_name=options.host, port=port, extra=extra)
    print(f"\nReady after {progress.elapsed():.0f} s. Try it in another terminal:\n", flush=True)
    print(f"{line}\n\nCtrl-C stops the server.\n", flush=True)
    try:
        status = process.wait()
    finally:
        stop(process)
    print(f"vLLM ended with status {status}", file=sys.stderr)
    return 1 if status else 0


def split_args(text: str) -> list[str]:
    """Split ARGS as a shell does; refuses the flags that have a name of their own here."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SetupFailure(f"ARGS={text} cannot be split into flags: {error}.") from error
    for flag, variable in (("--port", "PORT"), ("--host", "HOST"), ("--model", "MODEL")):
        if any(word == flag or word.startswith(f"{flag}=") for word in words):
            raise SetupFailure(
                f"ARGS contains {flag}; give it as {variable}=... instead, so that it is checked "
                f"before the server starts and appears in the curl line."
            )
    return words


def kv_cache_bytes(*, model: Model, available: int, widened: bool = False) -> int:
    """Memory for KV blocks on a CPU: half of what weights and runtime leave, within limits.

    ``widened``: 16-bit weights will be held as 32-bit ones.
    """
    weight_bytes = model.weight_bytes * (2 if widened else 1)
    rest = available - RUNTIME_BYTES - weight_bytes
    if rest < MIN_KV_BYTES:
        need = RUNTIME_BYTES + weight_bytes + MIN_KV_BYTES
        raise SetupFailure(
            f"Only {available / host.GIB:.1f} GiB of memory are available; {model.name} needs "
            f"{need / host.GIB:.1f} GiB (vLLM {RUNTIME_BYTES / host.GIB:.1f}, weights "
            f"{weight_bytes / host.GIB:.1f}, KV cache {MIN_KV_BYTES / host.GIB:.2f}). Close "
            "other programs, raise the container's limit, or choose a smaller model: MODEL=..."
        )
    return max(MIN_KV_BYTES, min(MAX_KV_BYTES, rest // 2))


def serve_command(
    *,
    vllm: Path,
    model: Model,
    host_name: str,
    port: int,
    kv_bytes: int,
    dtype: str,
    extra: Sequence[str],
) -> list[str]:
    """The `vllm serve` command line; the user's flags come last and so override ours.

    ``kv_bytes`` is 0 on a GPU, where vLLM's own defaults hold.
    """
    command = [str(vllm), "serve", model.source, "--served-model-name", model.name]
    command += ["--host", host_name, "--port", str(port), "--kv-cache-backend", "tagma"]
    command += ["--shutdown-timeout", str(DRAIN_SECONDS)]
    if kv_bytes:
        # Block 32 is the smallest the CPU attention kernel takes; eager mode starts in half a
        # minute instead of compiling for several. "auto" shortens the context to what fits.
        command += ["--dtype", dtype, "--enforce-eager", "--block-size", "32"]
        command += ["--max-model-len", "8192" if model.is_default else "auto"]
        command += ["--kv-cache-memory-bytes", str(kv_bytes)]
    return command + list(extra)


def provide_model(model: Model, environment: Environment) -> None:
    """Have the default model on disk, in one step; another one is vLLM's to load."""
    title, progress = f"model {model.name}", environment.progress
    if not model.is_default:
        progress.skip(title, "taken as it is; vLLM loads it")
    elif default_model.is_ready(default_model.model_dir(environment.root)):
        progress.skip(title, "up to date")
    else:
        with progress.step(f"{title} (download 93 MB, convert once)"):
            default_model.provide(
                root=environment.root, python=environment.python, progress=progress
            )


def start(
    command: Sequence[str], env: dict[str, str], *, log: Path | None = None
) -> subprocess.Popen[str]:
    """Start a server in a session of its own, so that Ctrl-C reaches it only through us.

    Its output goes to ``log``, or where ours goes.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        # Should this process be killed outright, the operating system asks vLLM to end.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    with contextlib.ExitStack() as stack:
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("w", encoding="utf-8"))
        return subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
            preexec_fn=die_with_parent,
            text=True,
        )


def wait_until_ready(
    process: subprocess.Popen[str], *, host_name: str, port: int, log: Path | None = None
) -> None:
    """Return when /health answers 200. Raises SetupFailure if the server ends first.

    ``log``: where its output went, if not to the terminal.
    """
    url = f"{base_url(host_name, port)}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        status = process.poll()
        if status is not None:
            raise SetupFailure(
                f"vLLM ended with status {status} before it was ready. The reason stands in its "
                f"output{f', {log}' if log else ' above'} (the last line that names an error). A "
                "flag in ARGS, a model that the tagma backend refuses (.venv/bin/tagma doctor "
                "MODEL), or too little memory are the usual ones."
            )
        with contextlib.suppress(urllib.error.URLError, OSError):
            opener.open(url, timeout=2.0).close()
            return
        time.sleep(0.3)


def stop(process: subprocess.Popen[str]) -> None:
    """End vLLM: SIGTERM to its API server, which ends the engine; then whatever is left.

    Interrupted again (a second Ctrl-C), it kills at once.
    """
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_SECONDS)
        deadline = time.monotonic() + GROUP_SECONDS
        while _group_is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
    except Interrupted:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def base_url(host_name: str, port: int) -> str:
    """The address to reach a server that listens on ``host_name``."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host_name, host_name)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def curl_line(*, model: Model, host_name: str, port: int, extra: Sequence[str]) -> str:
    """One line that can be pasted into a shell: a chat, or a completion for a base model."""
    name = _flag(extra, "--served-model-name") or model.name
    body: dict[str, object] = {"model": name, "max_tokens": 64, "temperature": 0}
    if model.has_chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The capital of France is"
    words = ["curl", "-s", base_url(host_name, port) + path, "-H", "Content-Type: application/json"]
    if key := _flag(extra, "--api-key"):
        words += ["-H", f"Authorization: Bearer {key}"]
    return shlex.join([*words, "-d", json.dumps(body)])


def _flag(words: Sequence[str], flag: str) -> str | None:
    """The value given to ``flag`` last, as ``--flag value`` or ``--flag=value``."""
    value = None
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            value = words[index + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler: raises Interrupted."""
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main())
