"""Post transfers through the real NIXL, as vLLM does and as runs, and time the parts.

Two agents in this process, each with a region of memory for each layer, as two servers on one
machine would have. The bytes of a block are a parameter: the work of posting is per descriptor, and
the memory of a real model's pool would not fit.
"""

from __future__ import annotations

import importlib.util
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vllm_tagma.errors import TagmaError
from vllm_tagma.integration.transfer.run_agent import BlockSelection, RunAgent
from vllm_tagma.transfer.descriptor_space import Descriptors
from vllm_tagma.transfer.joint_runs import Ids

_TIMEOUT_SECONDS = 60.0


class NixlMissingError(TagmaError, RuntimeError):
    """NIXL is not installed, or does not load."""


def require_nixl() -> None:
    """Raises ``NixlMissingError`` unless NIXL is installed. Does not load it."""
    if importlib.util.find_spec("nixl") is None:
        raise NixlMissingError("NIXL is not installed: pip install 'vllm-tagma[nixl]'")


class Posted(NamedTuple):
    """One transfer: milliseconds to describe it to NIXL, to post it, and until it is done."""

    describe_ms: float
    post_ms: float
    transfer_ms: float
    descriptors: int
    num_bytes: int


class _Ignored:
    """What ``RunAgent`` records; NIXL's own figures are used here."""

    def record_runs(self, **figures: int) -> None:
        """Nothing."""

    def record_unmerged(self, *, reason: str, descriptors: int) -> None:
        """The regions here are all alike, so this is a fault."""
        raise AssertionError(f"{descriptors} descriptors were not merged: {reason}")

    def record_preparation(self, seconds: float) -> None:
        """Nothing."""


class Peers:
    """A decode side, which reads, and a prefill side; use as a context manager."""

    def __init__(self, *, regions: int, num_blocks: int, block_bytes: int) -> None:
        """Registers ``regions * num_blocks * block_bytes`` bytes on each side.

        Raises:
            NixlMissingError: the package ``nixl`` cannot be imported.
        """
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise NixlMissingError(
                f"NIXL does not load ({error}): pip install 'vllm-tagma[nixl]'"
            ) from error
        self._block_bytes = block_bytes
        self._offsets = np.arange(regions, dtype=np.int64) * num_blocks
        self._memories = [
            # Not zeros: pages that nobody has written yet would be made while they are timed.
            np.ones((regions, num_blocks * block_bytes), dtype=np.uint8)
            for _ in range(2)
        ]
        config = nixl_agent_config(capture_telemetry=True)
        self._agents = [nixl_agent(str(uuid.uuid4()), config) for _ in range(2)]
        self._registered = []
        for agent, memory in zip(self._agents, self._memories, strict=True):
            spans = [(region.ctypes.data, region.nbytes, 0, "") for region in memory]
            self._registered.append(agent.get_reg_descs(spans, "DRAM"))
            agent.register_memory(self._registered[-1])
        self._local, remote = self._agents
        name = self._local.add_remote_agent(remote.get_agent_metadata())
        name = name.decode() if isinstance(name, bytes) else name
        self._runs = RunAgent(self._local, _Ignored())
        self._handles = [
            self._runs.prep_xfer_dlist(
                who, self._runs.get_xfer_descs(self._table(memory, num_blocks, block_bytes), "DRAM")
            )
            for who, memory in zip(("NIXL_INIT_AGENT", name), self._memories, strict=True)
        ]

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            self._runs.release_dlist_handle(handle)
        for agent, registered in zip(self._agents, self._registered, strict=True):
            agent.deregister_memory(registered)

    @staticmethod
    def _table(memory: Any, num_blocks: int, block_bytes: int) -> Descriptors:
        first = np.array([region.ctypes.data for region in memory], dtype=np.uint64)
        steps = np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        out = np.zeros((len(first) * num_blocks, 3), dtype=np.uint64)
        out[:, 0] = (first[:, None] + steps).ravel()
        out[:, 1] = block_bytes
        return out

    def post_as_vllm(self, local: list[int], remote: list[int]) -> Posted:
        """Indices of every block in every region, which NIXL merges where they follow in order."""

        def describe() -> Any:
            sides = [
                (self._offsets[:, None] + np.asarray(ids, dtype=np.int32)[None, :]).ravel()
                for ids in (local, remote)
            ]
            return self._local.make_prepped_xfer(
                "READ", self._handles[0], sides[0], self._handles[1], sides[1], notif_msg=b"done"
            )

        return self._post(describe)

    def post_as_runs(self, local: list[int], remote: list[int]) -> Posted:
        """What ``TagmaNixlConnector`` does."""

        def describe() -> Any:
            sides = [
                BlockSelection([(self._offsets, np.asarray(ids, dtype=np.int64))], _no_indices)
                for ids in (local, remote)
            ]
            return self._runs.make_prepped_xfer(
                "READ", self._handles[0], sides[0], self._handles[1], sides[1], notif_msg=b"done"
            )

        return self._post(describe)

    def copy_ms(self, blocks: Ids) -> float:
        """Milliseconds to copy blocks of the prefill side, in every region, to one place."""
        memory = self._memories[1]
        shape = (len(memory), -1, self._block_bytes)
        target = np.ones((len(memory), len(blocks), self._block_bytes), dtype=np.uint8)
        begin = time.perf_counter()
        for region, out in zip(memory.reshape(shape), target, strict=True):
            np.take(region, blocks, axis=0, out=out)
        return 1e3 * (time.perf_counter() - begin)

    def _post(self, describe: Callable[[], Any]) -> Posted:
        begin = time.perf_counter()
        handle = describe()
        described = time.perf_counter()
        self._local.transfer(handle)
        posted = time.perf_counter()
        while (state := self._local.check_xfer_state(handle)) == "PROC":
            if time.perf_counter() - posted > _TIMEOUT_SECONDS:
                raise TagmaError(f"a transfer did not end in {_TIMEOUT_SECONDS:.0f} s")
        done = time.perf_counter()
        if state != "DONE":
            raise TagmaError(f"a transfer ended in state {state}")
        figures = self._local.get_xfer_telemetry(handle)
        self._local.release_xfer_handle(handle)
        self._agents[1].get_new_notifs()
        return Posted(
            1e3 * (described - begin),
            1e3 * (posted - described),
            1e3 * (done - described),
            int(figures.descCount),
            int(figures.totalBytes),
        )


def _no_indices() -> Ids:
    raise AssertionError("runs need no indices")
