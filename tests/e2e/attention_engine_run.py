"""Runs stock on its Triton attention, then tagma on attention over ranges, over one workload.

    python attention_engine_run.py SETTINGS.json OUT.json

Needs Model Runner V2 under Triton's interpreter. The CPU platform takes its own attention whatever
is asked for; here it takes what is asked for, on both backends. Where vLLM writes to the cache it
sizes a tile by the card's generation, which is then Hopper's. On tagma rows are relocated before
each step, so that they have several ranges.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from config_engine_run import Engine
from forked import in_a_fork
from vllm.platforms.cpu import CpuPlatform

ATTENTION = {"paged": "TRITON_ATTN", "tagma": "CUSTOM"}


def take_what_is_asked_for() -> None:
    def chosen(cls: type, selected: Any, *args: Any, **kwargs: Any) -> str:
        return str(selected.get_path())

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)


class Watched(Engine):
    """Knows what the runner's attention was, and the most ranges that it read in one row."""

    def __init__(self, backend: str, settings: dict[str, Any]) -> None:
        super().__init__(backend, settings)
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        groups = [group for groups in self.runner.attn_groups for group in groups]
        names = sorted({group.backend.get_name() for group in groups})
        self.seen = {"attention": names, "ranges": 0, "table": 0, "groups": len(groups)}

    def step(self) -> None:
        super().step()
        tables = self.runner.block_tables
        self.seen["table"] += sum(int(table.sum()) for table in tables.input_block_tables)
        if self.tagma:
            held = [
                tables.ranges.num_ranges(group=group, row=row)
                for group in range(tables.num_kv_cache_groups)
                for row in range(tables.max_num_reqs)
            ]
            self.seen["ranges"] = max(self.seen["ranges"], *held)


def run(backend: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a pass over the workload saw, in a process of its own."""
    engine = Watched(backend, settings)
    engine.moves.enabled = engine.tagma
    return {**engine.run(), **engine.seen}


def main(settings_path: str, out: str) -> None:
    cases = json.loads(Path(settings_path).read_text())
    take_what_is_asked_for()
    reports: dict[str, Any] = {name: {} for name in cases}
    for name, case in cases.items():
        for backend, attention in ATTENTION.items():
            settings = case[backend]
            settings["engine"]["attention_backend"] = attention
            reports[name][backend] = in_a_fork(run, backend, settings)
    Path(out).write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
