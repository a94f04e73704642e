"""Two NIXL agents in one process, each with memory of its own; or a word why there are none."""

from __future__ import annotations

import os
import time
import uuid

import numpy as np
import pytest

from prerequisites import require_nixl

os.environ.setdefault("UCX_TLS", "tcp,self,sm")


class Peer:
    """An agent with ``regions`` regions of ``blocks`` blocks, which it has registered."""

    def __init__(self, *, regions, blocks, block_bytes):
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(capture_telemetry=True))
        self.memory = np.zeros((regions, blocks, block_bytes), dtype=np.uint8)
        spans = [(region.ctypes.data, region.nbytes, 0, "") for region in self.memory]
        self.registered = self.agent.get_reg_descs(spans, "DRAM")
        self.agent.register_memory(self.registered)

    def table(self):
        """One descriptor for each block and region, as vLLM prepares them."""
        regions, blocks, size = self.memory.shape
        first = np.array([region.ctypes.data for region in self.memory], dtype=np.uint64)
        out = np.zeros((regions * blocks, 3), dtype=np.uint64)
        out[:, 0] = (first[:, None] + np.arange(blocks, dtype=np.uint64) * np.uint64(size)).ravel()
        out[:, 1] = size
        return out

    def meet(self, other):
        """The name under which this agent knows the other."""
        name = self.agent.add_remote_agent(other.agent.get_agent_metadata())
        return name.decode() if isinstance(name, bytes) else name

    def finish(self, handle):
        """Post a transfer, wait for its end, and return NIXL's figures of it."""
        self.agent.transfer(handle)
        deadline = time.monotonic() + 30
        while (state := self.agent.check_xfer_state(handle)) == "PROC":
            assert time.monotonic() < deadline, "the transfer does not end"
        assert state == "DONE"
        figures = self.agent.get_xfer_telemetry(handle)
        self.agent.release_xfer_handle(handle)
        return figures

    def hears(self):
        """The next notifications, as soon as there are any."""
        deadline = time.monotonic() + 30
        while not (notifications := self.agent.get_new_notifs()):
            assert time.monotonic() < deadline, "nothing is heard"
        return [text for texts in notifications.values() for text in texts]

    def close(self):
        self.agent.deregister_memory(self.registered)


@pytest.fixture
def peers():
    """Makes two peers (local, remote) of given sizes; closed at the end of the test."""
    require_nixl()
    made = []

    def make(**sizes):
        made.extend(Peer(**sizes) for _ in range(2))
        return made[-2], made[-1]

    yield make
    for peer in made:
        peer.close()
