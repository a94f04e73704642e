"""How fast the device copies blocks, as the engine core can know it before any step has run.

A CPU is measured, with the mover and the threads that torch has in this process. A GPU belongs to
the workers; this process must not open it, so its memory clock and bus width are asked of NVML,
which takes no context. A copy reads and writes, and reaches four fifths of the bus.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import torch
from vllm.platforms import current_platform

from vllm_tagma._native import BlockMover
from vllm_tagma.copy_budget import CopyRate

_logger = logging.getLogger("vllm.tagma.scheduler")

_BLOCK: Final = 64 << 10
_BLOCKS: Final = 512
_ROUNDS: Final = 3
_BUS_SHARE: Final = 0.8


def copy_rate() -> CopyRate | None:
    """Of vLLM's device; None if it cannot be known. Takes some 20 ms on a CPU."""
    if current_platform.is_cpu():
        return CopyRate("cpu", _measured(), "measured at start-up")
    if current_platform.is_cuda():
        bus = _bus_of_nvml()
        return None if bus is None else CopyRate("cuda", bus / 2 * _BUS_SHARE, "by its memory bus")
    return None


def _measured() -> float:
    """Bytes a second that the mover copies from one half of a buffer to the other, at its best."""
    memory = torch.zeros(2 * _BLOCKS * _BLOCK, dtype=torch.uint8)
    mover = BlockMover(2 * _BLOCKS, [(memory.data_ptr(), _BLOCK, _BLOCK)])
    copies = [(i, _BLOCKS + i) for i in range(_BLOCKS)]
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        mover.move(copies, torch.get_num_threads())
        times.append(time.perf_counter() - begin)
    return _BLOCKS * _BLOCK / min(times)


def _bus_of_nvml() -> float | None:
    """Bytes a second of the first GPU's memory bus."""
    try:
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        try:
            physical = current_platform.device_id_to_physical_device_id(0)
            handle = pynvml.nvmlDeviceGetHandleByIndex(physical)
            clock = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)  # MHz
            width = pynvml.nvmlDeviceGetMemoryBusWidth(handle)  # bits
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # no NVML, an old driver, a virtual GPU that hides its clock
        _logger.warning("the GPU's memory bus is not known: %r", error)
        return None
    return 2.0 * clock * 1e6 * width / 8 or None
