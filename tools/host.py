"""What this machine is and whether it is enough: asked before anything long starts.

Every check raises SetupFailure with one paragraph (what was found, what is needed, the way out), or
returns what it measured. Standard library only.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from progress import SetupFailure

GIB = 1 << 30
# Measured: the CPU environment with test tools is 3.9 GB, the default model 0.4 GB with its
# sources, pip's unpacking needs room for the largest wheel twice.
NEED_DISK_CPU = 8 * GIB
NEED_DISK_CUDA = 25 * GIB
WHEEL_MACHINES = ("x86_64", "aarch64")
MIN_GLIBC = (2, 28)
NEWEST_PYTHON = (3, 14)


def check_platform() -> None:
    """Refuse what vLLM publishes no wheel for."""
    if sys.platform != "linux" or platform.machine() not in WHEEL_MACHINES:
        raise SetupFailure(
            f"This machine is {sys.platform}/{platform.machine()}; vLLM publishes wheels for Linux "
            f"on {' and '.join(WHEEL_MACHINES)} only. Run this in a Linux machine, virtual machine "
            "or container of that kind."
        )
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < MIN_GLIBC:
        raise SetupFailure(
            f"The C library here is {name or 'not glibc'} {version}; vLLM's wheels need glibc "
            f"{MIN_GLIBC[0]}.{MIN_GLIBC[1]} or newer (Debian 10, Ubuntu 18.10, RHEL 8). "
            "Use a newer distribution or a container of one."
        )
    if sys.version_info[:2] > NEWEST_PYTHON:
        raise SetupFailure(
            f"Python {platform.python_version()} is newer than vLLM's wheels support "
            f"(3.11 to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}). Name an older one: "
            "make serve PYTHON=python3.12."
        )


def wants_cuda(environ: Mapping[str, str] = os.environ) -> bool:
    """True if vLLM's CUDA build is wanted: TAGMA_CUDA=1 on a machine with an NVIDIA GPU.

    Without it a GPU machine serves and tests on the CPU: the GPU path of the tagma backend is wired
    but has not been proven, so it is the user's choice. Raises SetupFailure if it is set to
    anything but 0 or 1, or to 1 where no GPU is found.
    """
    wanted = environ.get("TAGMA_CUDA", "0")
    if wanted not in ("0", "1"):
        raise SetupFailure(f"TAGMA_CUDA={wanted}; it takes 0 or 1.")
    if wanted == "1" and not has_cuda():
        raise SetupFailure(
            "TAGMA_CUDA=1, but nvidia-smi lists no NVIDIA GPU here. Install the driver, or leave "
            "TAGMA_CUDA out to serve on the CPU."
        )
    return wanted == "1"


def has_cuda() -> bool:
    """True if nvidia-smi runs and lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16, AMX, Arm BF16)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


def check_compiler() -> str:
    """Compile a one-line C++17 program against Python.h; return the compiler's command."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    compiler = next((found for name in candidates if (found := shutil.which(name))), None)
    if compiler is None:
        raise SetupFailure(
            f"No C++ compiler was found (looked for {', '.join(candidates)}); the block manager is "
            "a C++17 extension. Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install "
            "gcc-c++) or name it: CXX=/path/to/c++ make ..."
        )
    source = "#include <Python.h>\n#include <optional>\nstd::optional<int> one = 1;\n"
    include = sysconfig.get_path("include")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{include}", "-"]
    result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if result.returncode != 0 and not (Path(include) / "Python.h").is_file():
        raise SetupFailure(
            f"Python.h is missing (looked in {include}); the C++ extension needs the headers of "
            f"Python {platform.python_version()}. Install them (Debian, Ubuntu: apt install "
            "python3-dev; Fedora: dnf install python3-devel)."
        )
    if result.returncode != 0:
        first = (result.stderr.strip().splitlines() or ["no message"])[0]
        raise SetupFailure(
            f"The compiler {compiler} does not compile C++17: {first}. GCC 9 and Clang 10 or newer "
            "do; name another one: CXX=/path/to/c++ make ..."
        )
    return compiler


def check_disk(*, folder: Path, need_bytes: int) -> None:
    """Refuse when the file system of ``folder`` has less than ``need_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise SetupFailure(
            f"Only {free / GIB:.1f} GiB are free on the disk of {folder}; the environment needs "
            f"{need_bytes / GIB:.0f} GiB. Free some space, or clone onto a larger disk."
        )


def available_memory(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes a new process can use: MemAvailable, or what the container's limit leaves if less."""
    available = 0
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    # Cached files are given back when memory is wanted; installing leaves gigabytes of them.
    used -= _cached_file_bytes(cgroup / "memory.stat")
    return min(available, max(int(limit) - used, 0))


def _cached_file_bytes(memory_stat: Path) -> int:
    try:
        lines = memory_stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    kinds = ("inactive_file", "active_file")
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in kinds)


def check_port(
    *, host: str, port_text: str, variable: str = "PORT", command: str = "make serve"
) -> int:
    """Return the port as a number if this machine can listen on ``host`` and it.

    ``variable`` and ``command``: where the user gave it, for the message.
    """
    try:
        port = int(port_text)
    except ValueError:
        port = -1
    if not 1 <= port <= 65535:
        raise SetupFailure(f"{variable}={port_text} is not a port: give a number from 1 to 65535.")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # As the server does: a port that is merely in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise SetupFailure(
            f"HOST={host} is no address of this machine: {error.strerror}. Use 127.0.0.1 for this "
            "machine only, or 0.0.0.0 for every network it is on."
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SetupFailure(
                f"Port {port} on {host} is in use by another program. Choose another: "
                f"{command} {variable}={port + 1 if port < 65535 else 8000}; "
                f"or find that program: ss -ltnp 'sport = :{port}'."
            ) from error
        raise SetupFailure(
            f"This machine cannot listen on {host}:{port}: {error.strerror}. Ports below 1024 "
            "need root; HOST must be an address of this machine (127.0.0.1, or 0.0.0.0 for all)."
        ) from error
    return port
