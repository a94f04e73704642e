"""A consumer of KV events as a router is one: it knows ZeroMQ, MessagePack and vLLM's messages.

    python event_subscriber.py EVENTS REPLAY

Subscribes to EVENTS and prints a line. A line on standard input then says how many batches were
published in all; what was missed is asked for at REPLAY. Prints, as JSON, how often each hash is
resident after the last batch, which hashes ever were, and how many batches came by replay. vLLM is
not imported.
"""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

import msgspec
import zmq


class Resident:
    """Hash -> number of blocks, after the events so far."""

    def __init__(self) -> None:
        self.count: collections.Counter[str] = collections.Counter()
        self.ever: set[str] = set()
        self.kinds: collections.Counter[str] = collections.Counter()

    def apply(self, payload: bytes) -> None:
        """One batch, in the order of its events."""
        for event in msgspec.msgpack.decode(payload)[1]:
            kind = event["type"]
            self.kinds[kind] += 1
            hashes = [block.hex() for block in event.get("block_hashes", ())]
            if kind == "BlockStored":
                self.count.update(hashes)
                self.ever.update(hashes)
            elif kind == "BlockRemoved":
                self.count.subtract(hashes)
            else:
                assert kind == "AllBlocksCleared", kind
                self.count.clear()
            assert min(self.count.values(), default=0) >= 0, "removed, but was not resident"


def main(events: str, replay: str) -> None:
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(events)
    print("subscribed", flush=True)
    published = int(sys.stdin.readline())
    batches: dict[int, bytes] = {}
    while len(batches) < published and subscriber.poll(2_000):
        _, number, payload = subscriber.recv_multipart()
        batches[int.from_bytes(number, "big")] = payload
    missed = set(range(published)) - batches.keys()
    if missed:
        batches.update(asked_again(context, replay, first=min(missed)))
    resident = Resident()
    for number in range(published):
        resident.apply(batches[number])
    found = {
        "resident": {block: n for block, n in sorted(resident.count.items()) if n},
        "ever": sorted(resident.ever),
        "kinds": resident.kinds,
        "batches": published,
        "replayed": len(missed),
    }
    print(json.dumps(found), flush=True)


def asked_again(context: Any, replay: str, *, first: int) -> dict[int, bytes]:
    """The batches from ``first`` on, from the publisher's buffer."""
    socket = context.socket(zmq.DEALER)
    socket.connect(replay)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches: dict[int, bytes] = {}
    while socket.poll(2_000):
        *_, number, payload = socket.recv_multipart()
        if int.from_bytes(number, "big", signed=True) < 0:
            break
        batches[int.from_bytes(number, "big")] = payload
    return batches


if __name__ == "__main__":
    main(*sys.argv[1:])
