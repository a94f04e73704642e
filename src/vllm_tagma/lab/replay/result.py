"""The result file of ``tagma replay --json``; ``docs/replay.md`` documents its fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tagma.lab import json_file
from vllm_tagma.lab.replay.counters import Counters, Times
from vllm_tagma.lab.replay.replay_settings import Settings
from vllm_tagma.lab.replay.trace import BadLine, Trace

KIND = "tagma-replay"
SCHEMA_VERSION = 1


@dataclass(kw_only=True)
class BackendResult:
    """What one backend did."""

    counters: Counters
    times: Times
    unfit: list[str] = field(default_factory=list)
    """Places of requests that the pool can never hold."""
    stuck: list[str] = field(default_factory=list)
    """Places of requests that were given up after steps in which nothing ran."""


@dataclass(kw_only=True)
class Result:
    """A whole replay."""

    created: str
    command: str
    trace: Trace
    settings: Settings
    seed: int
    limit: int | None
    num_blocks: int
    environment: dict[str, Any]
    backends: dict[str, BackendResult] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, in the order of the documentation."""
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "created": self.created,
            "command": self.command,
            "trace": {
                "name": self.trace.name,
                "format": self.trace.kind,
                "requests": len(self.trace.requests),
                "bad_lines": len(self.trace.bad),
                "first_bad_lines": [_bad(line) for line in self.trace.bad[:10]],
            },
            "seed": self.seed,
            "limit": self.limit,
            "num_blocks": self.num_blocks,
            "settings": dataclasses.asdict(self.settings),
            "environment": self.environment,
            "backends": {
                name: dataclasses.asdict(result) for name, result in self.backends.items()
            },
        }

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all. Raises OSError."""
        json_file.write(self.as_json(), path)


def _bad(line: BadLine) -> dict[str, str]:
    return {"place": line.place, "reason": line.reason}
