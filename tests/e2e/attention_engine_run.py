"""Runs stock on its Triton attention, then tagma on attention over ranges, over one workload.

    python attention_engine_run.py SETTINGS.json OUT.json

Needs Model Runner V2 under Triton's interpreter. The CPU platform takes its own attention whatever
is asked for; here it takes what is asked for, on both backends. Where vLLM writes to the cache it
sizes a tile by the card's generation, which is then Hopper's.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from config_engine_run import Engine, run_case
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform

ATTENTION = {"paged": "TRITON_ATTN", "tagma": "CUSTOM"}


def take_what_is_asked_for() -> None:
    def chosen(cls: type, selected: Any, *args: Any, **kwargs: Any) -> str:
        return str(selected.get_path())

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)


class Watched(Engine):
    """Knows what the runner's attention was, and the most ranges that it read in one row."""

    seen: dict[str, Any]

    def __init__(self, backend: str, settings: dict[str, Any]) -> None:
        super().__init__(backend, settings)
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        ((group,),) = self.runner.attn_groups
        Watched.seen = {"attention": group.backend.get_name(), "ranges": 0, "table": 0}

    def step(self) -> None:
        super().step()
        tables = self.runner.block_tables
        Watched.seen["table"] += int(tables.input_block_tables[0].sum())
        if self.tagma:
            rows = range(tables.max_num_reqs)
            most = max(tables.ranges.num_ranges(group=0, row=row) for row in rows)
            Watched.seen["ranges"] = max(Watched.seen["ranges"], most)


def main(settings_path: str, out: str) -> None:
    settings = json.loads(Path(settings_path).read_text())
    take_what_is_asked_for()
    reports = {}
    for backend, attention in ATTENTION.items():
        settings["engine"]["attention_backend"] = attention
        reports[backend] = {**run_case(backend, settings, Watched), **Watched.seen}
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(out).write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
