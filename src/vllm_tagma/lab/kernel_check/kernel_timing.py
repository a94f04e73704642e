"""Times of short GPU kernels: samples of many launches, as launched one by one and as a graph.

A kernel of a few microseconds is shorter than the resolution of an event and than a launch, so a
sample is the mean of ``INNER`` calls, or of fewer where a call takes long. One by one, a call costs
what the host needs to launch it or the kernel, whichever is longer; in a replayed graph it costs
the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch

SAMPLES: Final = 60
INNER: Final = 20


class Timing(NamedTuple):
    """Microseconds per call: the median of the samples, and their 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: list[float]) -> Timing:
        """Of samples in microseconds; needs at least one."""
        low, median, high = np.quantile(samples, (0.1, 0.5, 0.9)).tolist()
        return Timing(median=median, low=low, high=high)


def launched(call: Callable[[], object], calls: int = INNER) -> Timing:
    """``call`` launched one by one on the current stream, ``calls`` times a sample."""

    def several() -> None:
        for _ in range(calls):
            call()

    return _sampled(several, calls)


def replayed(call: Callable[[], object], calls: int = INNER) -> Timing:
    """``call`` captured into a CUDA graph, ``calls`` times, and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return _sampled(graph.replay, calls)


def long_call(call: Callable[[], object], *, seconds: float) -> Timing:
    """``call`` launched one by one, for kernels longer than a launch; takes about ``seconds``."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - begin
    inner = max(1, min(INNER, int(0.002 / once)))
    samples = []
    for _ in range(max(5, min(SAMPLES, int(seconds / (once * inner))))):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(inner):
            call()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) * 1000 / inner)
    return Timing.of(samples)


def on_host(call: Callable[[], object], *, seconds: float) -> Timing:
    """``call`` once, for a dry run without a device. ``seconds`` is not waited for."""
    begin = time.perf_counter()
    call()
    return Timing.of([(time.perf_counter() - begin) * 1e6])


def _sampled(several: Callable[[], object], calls: int) -> Timing:
    """Samples of a function that makes ``calls`` calls; three runs to warm up."""
    for _ in range(3):
        several()
    torch.cuda.synchronize()
    samples = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        several()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000 / calls)
    return Timing.of(samples)
