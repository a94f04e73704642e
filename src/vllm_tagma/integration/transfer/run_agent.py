"""A NIXL agent that posts a transfer as runs of blocks instead of block by block.

vLLM's worker names each block of each region by the index of its prepared descriptor. Our worker
says the same as block ids and region offsets (``BlockSelection``), and this agent, which stands in
for the real one, posts one descriptor for each joint run and region. What it cannot merge it posts
as vLLM would have, and counts it under the reason.

A merged descriptor covers exactly the bytes that the descriptors it replaces cover, on both sides,
so the peer, the handshake and the notifications are vLLM's own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from vllm_tagma.transfer.descriptor_space import Descriptors, DescriptorSpace, write_runs
from vllm_tagma.transfer.joint_runs import Ids, joint_runs

UNMERGED_REASONS: Final = ("layout", "sides_differ", "not_blocks")
"""Why a transfer was left to vLLM: its blocks do not lie back to back (or on one device) on a
side; the two sides have other regions or groups; it does not name blocks at all."""


class Recorder(Protocol):
    """Where the figures of posted transfers go; called from the thread that posts."""

    def record_runs(self, *, blocks: int, runs: int, descriptors: int, num_bytes: int) -> None:
        """A transfer was posted as runs. ``blocks`` and ``runs`` are those of one region."""

    def record_unmerged(self, *, reason: str, descriptors: int) -> None:
        """A transfer was posted as vLLM does; ``reason`` is one of ``UNMERGED_REASONS``."""

    def record_preparation(self, seconds: float) -> None:
        """What it took to describe a transfer to NIXL, runs or not."""


class BlockSelection:
    """The blocks of one side of a transfer: for each group, ids and where its regions begin.

    Stands for the array of descriptor indices that vLLM would have computed, and turns into it
    where somebody asks for an array.
    """

    def __init__(
        self, groups: Sequence[tuple[Ids, Ids]], indices: Callable[[], npt.NDArray[Any]]
    ) -> None:
        """``groups``: (offsets, block ids) of each group that has blocks."""
        self.groups = groups
        self._indices = indices

    def __len__(self) -> int:
        return sum(len(offsets) * len(blocks) for offsets, blocks in self.groups)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        del copy  # always new
        return self._indices() if dtype is None else self._indices().astype(dtype)

    def boundaries(self) -> Ids:
        """Where any region begins, ascending."""
        return np.unique(np.concatenate([offsets for offsets, _ in self.groups]))


class _List:
    """Descriptors on their way from ``get_xfer_descs`` to ``prep_xfer_dlist``."""

    def __init__(self, table: npt.NDArray[Any], memory: str | None) -> None:
        self.table = table
        self.memory = memory


class _Prepared:
    """What is known of a prepared list."""

    def __init__(self, *, space: DescriptorSpace, memory: str | None, agent_name: str) -> None:
        self.space = space
        self.memory = memory
        self.agent_name = agent_name


class RunAgent:
    """Wraps a ``nixl_agent``; what is not defined here goes to it."""

    def __init__(self, agent: Any, recorder: Recorder) -> None:
        self._agent = agent
        self._recorder = recorder
        self._prepared: dict[Any, _Prepared] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        if isinstance(descs, np.ndarray) and descs.ndim == 2:
            return _List(descs, mem_type)
        return self._agent.get_xfer_descs(descs, mem_type)

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, **kwargs: Any
    ) -> Any:
        """Prepare as NIXL does, and remember the list in closed form."""
        listed = xfer_list
        if isinstance(xfer_list, _List):
            mem_type = xfer_list.memory
            xfer_list = xfer_list.table
            listed = self._agent.get_xfer_descs(xfer_list, mem_type)
        handle = self._agent.prep_xfer_dlist(agent_name, listed, mem_type, **kwargs)
        if isinstance(xfer_list, np.ndarray) and len(xfer_list):
            self._prepared[handle] = _Prepared(
                space=DescriptorSpace(xfer_list), memory=mem_type, agent_name=agent_name
            )
        return handle

    def release_dlist_handle(self, handle: Any) -> Any:
        self._prepared.pop(handle, None)
        return self._agent.release_dlist_handle(handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        **kwargs: Any,
    ) -> Any:
        """Describe a transfer to NIXL, as runs if it can be; returns NIXL's handle.

        Raises:
            ValueError: a block lies outside its region.
        """
        start = time.perf_counter()
        merged = self._merge(local_xfer_side, local_indices, remote_xfer_side, remote_indices)
        if isinstance(merged, str):
            handle = self._agent.make_prepped_xfer(
                operation,
                local_xfer_side,
                np.asarray(local_indices),
                remote_xfer_side,
                np.asarray(remote_indices),
                notif_msg,
                **kwargs,
            )
            self._recorder.record_unmerged(reason=merged, descriptors=len(local_indices))
        else:
            ours, theirs = (self._prepared[side] for side in (local_xfer_side, remote_xfer_side))
            handle = self._agent.initialize_xfer(
                operation,
                self._agent.get_xfer_descs(merged.local, ours.memory),
                self._agent.get_xfer_descs(merged.remote, theirs.memory),
                theirs.agent_name,
                notif_msg,
                **kwargs,
            )
            self._recorder.record_runs(
                blocks=merged.blocks,
                runs=merged.runs,
                descriptors=len(merged.local),
                num_bytes=int(merged.local[:, 1].sum()),
            )
        self._recorder.record_preparation(time.perf_counter() - start)
        return handle

    def _merge(self, local_side: Any, local: Any, remote_side: Any, remote: Any) -> _Merged | str:
        """The transfer as runs, or the reason why not."""
        ours, theirs = self._prepared.get(local_side), self._prepared.get(remote_side)
        if ours is None or theirs is None:
            return "not_blocks"
        if not isinstance(local, BlockSelection) or not isinstance(remote, BlockSelection):
            return "not_blocks"
        if len(local.groups) != len(remote.groups) or not local.groups:
            return "sides_differ"
        edges, their_edges = local.boundaries(), remote.boundaries()
        merged = _Merged()
        for (offsets, ids), (their_offsets, their_ids) in zip(
            local.groups, remote.groups, strict=True
        ):
            if len(offsets) != len(their_offsets) or len(ids) != len(their_ids):
                return "sides_differ"
            here = ours.space.regions(offsets, edges)
            there = theirs.space.regions(their_offsets, their_edges)
            if here is None or there is None:
                return "layout"
            runs = joint_runs(ids, their_ids)
            merged.add(
                blocks=len(ids),
                runs=runs.num_runs,
                local=write_runs(*here, runs.local, runs.counts),
                remote=write_runs(*there, runs.remote, runs.counts),
            )
        if not np.array_equal(merged.local[:, 1], merged.remote[:, 1]):
            return "sides_differ"  # blocks of other sizes: NIXL will say so
        return merged


class _Merged:
    """The descriptors of both sides, pair by pair."""

    def __init__(self) -> None:
        self.blocks = self.runs = 0
        self._local: list[Descriptors] = []
        self._remote: list[Descriptors] = []

    def add(self, *, blocks: int, runs: int, local: Descriptors, remote: Descriptors) -> None:
        self.blocks += blocks
        self.runs += runs
        self._local.append(local)
        self._remote.append(remote)

    @functools.cached_property
    def local(self) -> Descriptors:
        return np.concatenate(self._local)

    @functools.cached_property
    def remote(self) -> Descriptors:
        return np.concatenate(self._remote)
