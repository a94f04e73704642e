"""`make pd`: a prefill server, a decode server and one address for both, in one command.

Checks and builds what `make serve` does, and NIXL; then starts two `vllm serve` on the tagma
backend, whose connector moves the KV of a prompt from the one to the other, and the small proxy of
`src/vllm_tagma/lab/pd/`. Five ports in a row are used: the proxy's, PORT, then those of the prefill
and decode servers and of their NIXL side channels. All are stopped when one of them or this process
ends, in whichever way it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import host
import serve
from environment import Environment
from models import Model, resolve
from progress import Progress, SetupFailure

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "make pd"
PORT_USES = (
    "the proxy",
    "the prefill server",
    "the decode server",
    "the prefill server's NIXL side channel",
    "the decode server's NIXL side channel",
)
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Side:
    """One of the two servers."""

    name: str
    role: str
    port: int
    side_channel_port: int
    cores: Sequence[int]
    extra: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="pd.py", description=__doc__)
    parser.add_argument("--model", default="", help="folder or hub id; default: the built-in model")
    parser.add_argument("--host", default="127.0.0.1", help="where the proxy listens")
    parser.add_argument("--port", default="8000", help="of the proxy; the next four are used too")
    parser.add_argument("--connector", default="TagmaNixlConnector")
    parser.add_argument("--args", default="", help="flags of vllm serve for both servers")
    parser.add_argument("--prefill-args", default="")
    parser.add_argument("--decode-args", default="")
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, serve.interrupt)
    try:
        return run(options)
    except SetupFailure as failure:
        print(f"\n{COMMAND} failed.\n{failure}", file=sys.stderr)
        return 1
    except serve.Interrupted as interrupted:
        print(f"\nstopped ({interrupted})", flush=True)
        return 128 + interrupted.number


def run(options: argparse.Namespace) -> int:
    """Check, build, serve. Raises SetupFailure or Interrupted."""
    sides = plan(options)
    model = resolve(text=options.model, root=ROOT)
    host.check_platform()
    host.check_compiler()
    if host.wants_cuda():
        raise SetupFailure(
            "TAGMA_CUDA=1, but make pd runs both servers on the CPU: one GPU has no room for two "
            "without more settings. Leave TAGMA_CUDA out."
        )
    dtype = "bfloat16" if host.has_bfloat16() else "float32"
    kv_bytes = serve.kv_cache_bytes(
        model=model, available=host.available_memory() // 2, widened=dtype == "float32"
    )
    progress = Progress(total=7, log_dir=ROOT / "build" / "logs")
    environment = build(progress, model)
    check_ports(options)  # installing may have taken minutes
    processes: list[subprocess.Popen[str]] = []
    try:
        with progress.step("two vLLM servers and the proxy (ready in about a minute)"):
            for side in sides:
                command = server_command(
                    side,
                    vllm=environment.folder / "bin" / "vllm",
                    model=model,
                    connector=options.connector,
                    kv_bytes=kv_bytes,
                    dtype=dtype,
                )
                progress.say(f"{side.name}: {shlex.join(command)}")
                progress.say(f"its log: {log_of(side).relative_to(ROOT)}")
                env = {**environment.env, **server_environment(side)}
                processes.append(serve.start(command, env, log=log_of(side)))
            for side, process in zip(sides, processes, strict=True):
                log = log_of(side)
                serve.wait_until_ready(process, host_name="127.0.0.1", port=side.port, log=log)
            command = proxy_command(environment.python, options, sides)
            processes.append(serve.start(command, environment.env))
            port = int(options.port)
            serve.wait_until_ready(processes[-1], host_name=options.host, port=port)
        line = serve.curl_line(
            model=model, host_name=options.host, port=int(options.port), extra=words(options.args)
        )
        print(f"\nReady after {progress.elapsed():.0f} s. Try it in another terminal:\n")
        print(f"{line}\n")
        print("What was transferred, and in how many pieces, by the decode server:\n")
        url = serve.base_url("127.0.0.1", sides[1].port)
        print(f"curl -s {url}/metrics | grep -E '^vllm:(nixl|tagma_transfer)_.*(_total|_sum){{'\n")
        print("Ctrl-C stops all three.\n", flush=True)
        return first_end(("prefill server", "decode server", "proxy"), processes)
    finally:
        for process in reversed(processes):
            serve.stop(process)


def plan(options: argparse.Namespace) -> list[Side]:
    """The two servers. Raises SetupFailure for ports and flags that cannot be taken."""
    check_ports(options)
    port = int(options.port)
    both = words(options.args)
    prefill_cores, decode_cores = split_cores(sorted(os.sched_getaffinity(0)))
    return [
        Side(
            "prefill",
            "kv_producer",
            port + 1,
            port + 3,
            prefill_cores,
            [*both, *words(options.prefill_args)],
        ),
        Side(
            "decode",
            "kv_consumer",
            port + 2,
            port + 4,
            decode_cores,
            [*both, *words(options.decode_args)],
        ),
    ]


def check_ports(options: argparse.Namespace) -> None:
    """Raises SetupFailure, naming the use, unless all five ports can be listened on."""
    port = host.check_port(host=options.host, port_text=options.port, command=COMMAND)
    if port + len(PORT_USES) - 1 > 65535:
        raise SetupFailure(f"PORT={port}: it and the next four are used; the last port is 65535.")
    for offset, use in enumerate(PORT_USES[1:], start=1):
        try:
            host.check_port(host="127.0.0.1", port_text=str(port + offset), command=COMMAND)
        except SetupFailure as failure:
            raise SetupFailure(
                f"Port {port + offset}, for {use}, cannot be had (PORT={port} and the next four "
                f"are used). Choose another PORT. {failure}"
            ) from failure


def words(text: str) -> list[str]:
    """Flags of vLLM; refuses those that this command sets."""
    found = serve.split_args(text)
    for flag in ("--kv-transfer-config", "--served-model-name"):
        if any(word.partition("=")[0].partition(".")[0] == flag for word in found):
            raise SetupFailure(
                f"The flags {text!r} contain {flag}, which make pd sets. CONNECTOR=... names "
                "another connector."
            )
    return found


def log_of(side: Side) -> Path:
    """Where the output of a server goes."""
    return ROOT / "build" / "logs" / f"pd-{side.name}.log"


def split_cores(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Half of the cores for each server; a single one for both."""
    half = len(cores) // 2
    return (cores[:half], cores[half:]) if half else (cores, cores)


def build(progress: Progress, model: Model) -> Environment:
    """Environment, plugin, NIXL and model."""
    environment = Environment(root=ROOT, progress=progress, cuda=False)
    if not environment.folder.exists():
        host.check_disk(folder=ROOT, need_bytes=host.NEED_DISK_CPU)
    environment.create()
    environment.install_vllm()
    environment.install_plugin()
    environment.install_nixl()
    serve.provide_model(model, environment)
    return environment


def server_command(
    side: Side, *, vllm: Path, model: Model, connector: str, kv_bytes: int, dtype: str
) -> list[str]:
    """`vllm serve` for one side: that of `make serve`, with a connector."""
    transfer = json.dumps({"kv_connector": connector, "kv_role": side.role})
    return serve.serve_command(
        vllm=vllm,
        model=model,
        host_name="127.0.0.1",
        port=side.port,
        kv_bytes=kv_bytes,
        dtype=dtype,
        extra=["--kv-transfer-config", transfer, *side.extra],
    )


def server_environment(side: Side) -> dict[str, str]:
    """Variables of one server; what the user has set is left alone.

    UCX is given the transports of one machine without special hardware: it would try all others
    first. Each server computes on its own half of the cores.
    """
    wanted = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side.side_channel_port),
        "UCX_TLS": "tcp,self,sm",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in side.cores),
    }
    own = ("UCX_TLS", "VLLM_CPU_OMP_THREADS_BIND")
    return {k: v for k, v in wanted.items() if k not in own or k not in os.environ}


def proxy_command(python: Path, options: argparse.Namespace, sides: Sequence[Side]) -> list[str]:
    """The proxy, on the host and port that were asked for."""
    command = [str(python), "-m", "vllm_tagma.lab.pd.pd_proxy", "--host", options.host]
    command += ["--port", options.port]
    for side in sides:
        command += [f"--{side.name}", serve.base_url("127.0.0.1", side.port)]
    return command


def first_end(names: Sequence[str], processes: Sequence[subprocess.Popen[str]]) -> int:
    """Wait until one of the processes ends, and say which; returns this command's status."""
    while True:
        for name, process in zip(names, processes, strict=True):
            status = process.poll()
            if status is not None:
                print(f"the {name} ended with status {status}; stopping all", file=sys.stderr)
                return 1
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
