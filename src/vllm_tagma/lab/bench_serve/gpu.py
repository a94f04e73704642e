"""What ``nvidia-smi`` says: which GPUs there are, and their memory while a load runs.

The program rather than a library: it comes with every driver, and one process that loops costs the
measured server nothing.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_MIB = 1 << 20
_FIELDS = "index,name,driver_version,memory.total,memory.used"
_SAMPLED = "index,memory.used,utilization.gpu,power.draw,clocks.sm,temperature.gpu"


class Gpu(NamedTuple):
    """One GPU; memory in bytes."""

    number: int
    name: str
    driver: str
    memory_total: int
    memory_used: int


class GpuSample(NamedTuple):
    """One line of the log: bytes in use, percent of time that kernels ran; None: not reported."""

    number: int
    memory_used: int
    utilization: float | None
    power_watts: float | None
    clock_mhz: float | None
    temperature: float | None


def gpus() -> list[Gpu]:
    """The GPUs that this process may use: all, or those of CUDA_VISIBLE_DEVICES.

    Empty where there is no driver.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) == 5 and row[0].isdigit():
            index, name, driver, total, used = row
            found.append(Gpu(int(index), name, driver, _mib(total), _mib(used)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and all(part.strip().isdigit() for part in visible.split(",")):
        chosen = {int(part) for part in visible.split(",")}
        found = [gpu for gpu in found if gpu.number in chosen]
    return found


def sampling_command(*, indices: Sequence[int], interval: float) -> list[str]:
    """The command that prints a line a GPU every ``interval`` seconds until it is stopped."""
    return [
        "nvidia-smi",
        f"--id={','.join(map(str, indices))}",
        f"--query-gpu={_SAMPLED}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={max(100, round(interval * 1000))}",
    ]


class SampleLog:
    """Reads what the sampling command has written since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def new(self) -> list[GpuSample]:
        """Whole lines only; a line that is not a sample (a warning) is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        rows = csv.reader(whole.decode(errors="replace").splitlines(), skipinitialspace=True)
        return [_sample(row) for row in rows if len(row) == 6 and row[0].isdigit()]


def _sample(row: list[str]) -> GpuSample:
    used = _number(row[1])
    return GpuSample(int(row[0]), round((used or 0.0) * _MIB), *map(_number, row[2:]))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def _mib(text: str) -> int:
    return round((_number(text) or 0.0) * _MIB)
