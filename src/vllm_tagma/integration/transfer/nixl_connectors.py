"""``TagmaNixlConnector`` and ``TagmaNixlPushConnector``: vLLM's, posting runs of blocks.

Everything but the posting is vLLM's: scheduler side, handshake, notifications, leases, failures. On
the wire each is the connector that it derives from, so either side of a transfer may be stock. They
work on both KV-cache backends; the tagma backend is what makes the runs long.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlBaseConnector,
    NixlPullConnector,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
    NixlPushConnector,
    NixlPushConnectorScheduler,
    NixlPushConnectorWorker,
)

from vllm_tagma.errors import UnsupportedError
from vllm_tagma.integration.seams import require_seams
from vllm_tagma.integration.transfer.run_agent import BlockSelection, RunAgent
from vllm_tagma.integration.transfer.transfer_stats import RunPromMetrics, RunStats

_ONLY_BY_STOCK_NAME: Final = (
    ("parallel_config", "decode_context_parallel_size", 1, "--decode-context-parallel-size 1"),
    ("parallel_config", "prefill_context_parallel_size", 1, "--prefill-context-parallel-size 1"),
    ("model_config", "enable_return_routed_experts", False, "no --enable-return-routed-experts"),
)
"""Options for which vLLM checks or adjusts its configuration by the connector's name: with another
name it would not."""


class _RunWorker:
    """A worker that names blocks instead of descriptors, to an agent that posts runs of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _cores_kept():
            super().__init__(*args, **kwargs)
        self.xfer_stats = RunStats()
        self.nixl_wrapper: Any = RunAgent(self.nixl_wrapper, self.xfer_stats)

    def _compute_desc_ids(self, block_ids: Any, *args: Any, **kwargs: Any) -> BlockSelection:
        """The blocks, and where their regions begin in the prepared list.

        vLLM's index of a block is its id plus an offset of its group and region; so the offsets
        are the indices of block 0, in vLLM's own arithmetic.
        """
        compute = functools.partial(super()._compute_desc_ids, *args, **kwargs)  # type: ignore[misc]
        groups = []
        for number, ids in enumerate(block_ids):
            if len(ids):
                first = [[0] if other == number else [] for other in range(len(block_ids))]
                offsets = compute(block_ids=first)
                groups.append(
                    (np.asarray(offsets, dtype=np.int64), np.asarray(ids, dtype=np.int64))
                )
        return BlockSelection(groups, functools.partial(compute, block_ids=block_ids))


class TagmaNixlPullWorker(_RunWorker, NixlPullConnectorWorker):  # type: ignore[misc]
    """Reads the prompt's blocks from the peer's memory, run by run."""


class TagmaNixlPushWorker(_RunWorker, NixlPushConnectorWorker):  # type: ignore[misc]
    """Writes the prompt's blocks into the peer's memory, run by run."""


class _RunConnector:
    """What both connectors add to vLLM's: the workers, and metrics of runs."""

    _scheduler_type: type
    _worker_type: type

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """As vLLM's connectors do, with another class of worker.

        Raises:
            SeamError: vLLM's NIXL connector is not one that this package knows.
            UnsupportedError: an option that vLLM serves under its own connector's name only.
        """
        require_seams("transfer")
        _require_served(vllm_config, type(self).__name__)
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        engine_id = vllm_config.kv_transfer_config.engine_id
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = self._scheduler_type(vllm_config, engine_id, kv_cache_config)
        else:
            self.connector_worker = self._worker_type(vllm_config, engine_id, kv_cache_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RunStats:
        return RunStats() if data is None else RunStats(data=data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> RunPromMetrics:
        return RunPromMetrics(*args, **kwargs)


class TagmaNixlConnector(_RunConnector, NixlPullConnector):  # type: ignore[misc]
    """vLLM's ``NixlConnector`` (pull) with one descriptor for each run of blocks and region."""

    _scheduler_type = NixlPullConnectorScheduler
    _worker_type = TagmaNixlPullWorker


class TagmaNixlPushConnector(_RunConnector, NixlPushConnector):  # type: ignore[misc]
    """vLLM's ``NixlPushConnector`` with one descriptor for each run of blocks and region."""

    _scheduler_type = NixlPushConnectorScheduler
    _worker_type = TagmaNixlPushWorker


@contextlib.contextmanager
def _cores_kept() -> Iterator[None]:
    """Give this thread its cores back, which vLLM's NIXL worker narrows on a CPU.

    It leaves the last core of each NUMA node, meaning to set that apart for transfers. But this
    thread computes the model; and two servers of one machine would compute on one core. Threads
    that NIXL starts meanwhile stay where vLLM wants them.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    if cores is not None and os.sched_getaffinity(0) != cores:
        os.sched_setaffinity(0, cores)


def _require_served(vllm_config: Any, name: str) -> None:
    for part, option, served, way_out in _ONLY_BY_STOCK_NAME:
        value = getattr(getattr(vllm_config, part, None), option, served)
        if value != served:
            raise UnsupportedError(
                f"{name} does not serve {option}={value}: vLLM checks it under the names of its "
                f"own NIXL connectors only. Set {way_out}, or name vLLM's NixlConnector."
            )
