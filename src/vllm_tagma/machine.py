"""What this machine has that decides flags: CPUs, memory, NUMA nodes, bfloat16, GPUs.

Read from the system's files and ``nvidia-smi``; what cannot be read counts as absent. Imports
nothing, so that ``tagma doctor`` can ask on a broken installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86's two, then ARM's


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory in bytes; 0 where the system does not say."""

    cpus: int
    """CPUs this process may run on."""
    cpu_quota: float | None
    """CPUs' worth of time that a container allows; None without a limit."""
    memory: int
    """All of it, or what a container allows."""
    free_memory: int
    """What can be had without swapping."""
    nodes: tuple[str, ...]
    """CPUs of each NUMA node that has some, as Linux writes them: ``0-15,32-47``."""
    bfloat16: bool
    """Whether the CPU computes in it; else it is emulated in float32."""
    gpus: tuple[str, ...] = ()
    """Names of NVIDIA GPUs."""


def this_machine(root: Path = Path("/")) -> Machine:
    """Read the files of the system below ``root``; GPUs and the CPUs allowed are always asked of
    this machine. Never raises."""
    fields = _meminfo(root / "proc/meminfo")
    total, free = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    cgroup = root / "sys/fs/cgroup"
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and (not total or limit < total):
        total, free = limit, min(free or limit, max(limit - (used or 0), 0))
    return Machine(
        cpus=_cpus(),
        cpu_quota=_quota(cgroup / "cpu.max"),
        memory=total,
        free_memory=free,
        nodes=_nodes(root / "sys/devices/system/node"),
        bfloat16=bool(_cpu_flags(root / "proc/cpuinfo") & _BFLOAT16_FLAGS),
        gpus=_gpus(),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _meminfo(path: Path) -> dict[str, int]:
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdecimal():
            found[name] = int(words[0]) * 1024
    return found


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _quota(path: Path) -> float | None:
    words = _text(path).split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def _nodes(folder: Path) -> tuple[str, ...]:
    paths = [path for path in folder.glob("node*/cpulist") if path.parent.name[4:].isdecimal()]
    lists = [_text(path) for path in sorted(paths, key=lambda path: int(path.parent.name[4:]))]
    return tuple(cpus for cpus in lists if cpus)  # a node may be memory only


def _cpu_flags(path: Path) -> set[str]:
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(rest.split())
    return set()


def _gpus() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
