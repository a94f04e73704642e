"""Samples of a running server: KV use and queues, memory of its processes and of the GPU.

A thread takes one sample an interval and appends it to a JSON Lines file. It only reads: a server
that does not answer in time gives a sample without those values.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from vllm_tagma.lab.bench_serve import serve_metrics
from vllm_tagma.lab.bench_serve.gpu import SampleLog


class Sampler:
    """Samples until it is closed; a context manager.

    A sample: ``t`` (seconds since ``begin``, a ``time.monotonic()``), ``stage``, ``kv_usage``
    (0..1), ``running``, ``waiting``, ``preemptions``, ``finished``, ``mean_ranges`` and
    ``max_ranges`` (of the requests that run, tagma only), ``rss_bytes`` (resident memory summed
    over the server's processes, so pages that they share count more than once), ``gpu_bytes`` (in
    use on all its GPUs, by anyone). A value that could not be had is None.
    """

    def __init__(
        self,
        *,
        base: str,
        pid: int,
        interval: float,
        begin: float,
        path: Path,
        gpu_log: Path | None = None,
    ) -> None:
        self._base = base
        self._pid = pid
        self._interval = interval
        self._begin = begin
        self._path = path
        self._gpu = SampleLog(gpu_log) if gpu_log is not None else None
        self._gpu_bytes: dict[int, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tagma-bench-sampler", daemon=True)
        self.stage = ""
        self.samples: list[dict[str, Any]] = []

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=10.0)

    @property
    def finished(self) -> float | None:
        """Requests that the server has finished, as of the last sample."""
        return self.samples[-1]["finished"] if self.samples else None

    def _run(self) -> None:
        with self._path.open("w", encoding="utf-8") as file:
            due = time.monotonic()
            while not self._done.is_set():
                sample = self._sample()
                self.samples.append(sample)
                file.write(json.dumps(sample) + "\n")
                file.flush()
                due = max(due + self._interval, time.monotonic())
                self._done.wait(due - time.monotonic())

    def _sample(self) -> dict[str, Any]:
        text = serve_metrics.fetch(self._base)
        values = serve_metrics.sampled(text) if text else {}
        if self._gpu is not None:
            self._gpu_bytes.update({s.number: s.memory_used for s in self._gpu.new()})
        return {
            "t": round(time.monotonic() - self._begin, 3),
            "stage": self.stage,
            "kv_usage": values.get(serve_metrics.KV_USAGE),
            "running": values.get(serve_metrics.RUNNING),
            "waiting": values.get(serve_metrics.WAITING),
            "preemptions": values.get(serve_metrics.PREEMPTIONS),
            "finished": values.get(serve_metrics.FINISHED),
            "mean_ranges": _mean(
                values.get(serve_metrics.TAGMA_RANGES), values.get(serve_metrics.TAGMA_REQUESTS)
            ),
            "max_ranges": values.get(serve_metrics.TAGMA_MAX_RANGES),
            "rss_bytes": resident_bytes(self._pid),
            "gpu_bytes": sum(self._gpu_bytes.values()) if self._gpu_bytes else None,
        }


def _mean(total: float | None, count: float | None) -> float | None:
    return None if total is None or not count else total / count


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process and all below it; None if it is gone."""
    import psutil

    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
