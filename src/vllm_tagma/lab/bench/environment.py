"""What a number depends on: machine, governor, pinning, system, versions, commit.

Everything is read from the system at run time; what cannot be read is recorded as None, never
guessed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from vllm_tagma import versions
from vllm_tagma.lab.bench import core_source
from vllm_tagma.lab.bench.core_source import git

_CPU = Path("/sys/devices/system/cpu")
_PACKAGES = ("torch", "numpy", "typer", "rich")


def capture(*, root: Path | None = None) -> dict[str, Any]:
    """The environment of this process, as written to the result file.

    ``root`` is where the source tree is looked for, to name its commit; by default the folder this
    module is in.
    """
    return {
        "machine": {
            "cpu": _cpu_model(),
            "architecture": platform.machine(),
            "cpus_online": os.cpu_count(),
            "governor": _governors(),
            "turbo": _turbo(),
            "memory_bytes": _memory_bytes(),
            "hypervisor": _hypervisor(),
            "load_average": [round(value, 2) for value in os.getloadavg()],
        },
        "system": {"os": platform.system(), "release": platform.release(), "libc": _libc()},
        "pinning": {"cpus": pinned_cpus()},
        "versions": {
            "python": platform.python_version(),
            "python_build": platform.python_compiler(),
            "vllm": versions.installed_vllm_version(),
            "vllm_tagma": versions.tagma_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "source": {
            **_commit(root or Path(__file__).resolve().parent),
            "core": core_source.compiled(),
        },
    }


def pin(cpu: int | None) -> list[int]:
    """Pins this process to one CPU (the last it may use, if None); returns where it runs now.

    The first CPU gets most interrupts, hence the last. Where pinning is not available (macOS, a
    container that forbids it) nothing happens and the result shows it.

    Raises:
        ValueError: ``cpu`` is not one this process may use.
    """
    allowed = pinned_cpus()
    if cpu is not None and cpu not in allowed:
        raise ValueError(f"--cpu {cpu} is not available: this process may use {allowed}")
    if allowed:
        try:
            os.sched_setaffinity(0, {cpu if cpu is not None else allowed[-1]})
        except OSError:
            return allowed
    return pinned_cpus()


def pinned_cpus() -> list[int]:
    """The CPUs this process may run on; empty where the system does not say."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return []


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _cpu_field(*names: str) -> str | None:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return None


def _cpu_model() -> str | None:
    return _cpu_field("model name", "Model", "cpu model") or platform.processor() or None


def _governors() -> list[str] | None:
    """The distinct frequency governors of all CPUs; None where there is no choice (most VMs)."""
    found = {_read(path) for path in _CPU.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {None}
    return sorted(name for name in found if name) or None


def _turbo() -> bool | None:
    intel = _read(_CPU / "intel_pstate" / "no_turbo")
    if intel is not None:
        return intel == "0"
    boost = _read(_CPU / "cpufreq" / "boost")
    return None if boost is None else boost == "1"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _hypervisor() -> bool | None:
    flags = _cpu_field("flags")
    return None if flags is None else "hypervisor" in flags.split()


def _libc() -> str | None:
    return " ".join(platform.libc_ver()).strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> dict[str, Any]:
    """Commit of the source tree that holds ``folder``, and whether files differ from it; the last
    commit that changed the core, None where what was measured was not built from it."""
    # A wheel inside somebody else's repository must not be given that repository's commit.
    tracked = git(folder, "ls-files", "--error-unmatch", str(Path(__file__).resolve()))
    commit = git(folder, "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return {"commit": None, "modified": None, "core_commit": None}
    return {
        "commit": commit,
        "modified": bool(git(folder, "status", "--porcelain", "--untracked-files=no")),
        "core_commit": core_source.commit_of_core(),
    }
