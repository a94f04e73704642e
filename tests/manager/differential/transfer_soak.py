"""Transfers in flight under moves and faults, at any length.

    .venv/bin/python tests/manager/differential/transfer_soak.py --operations 1000000 --seed 1

Scheduler traces with a peer (``connector_trace.py``) one after the other, until the manager was
called as often as asked: prompts that arrive late, in part or not at all, requests aborted while
they are received, finished ones that are fetched, a pool that is too small, rows that move in every
step. A worker's memory checks each token that is read or sent. ``test_connector_traces.py`` runs a
few of the same. The first failure ends the run with its seed and mode.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

MODES = ("live/65536/0.0", "live/8/0.05", "idle/7/0.3", "default")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=1_000_000, help="calls of the manager")
    parser.add_argument("--seed", type=int, default=1, help="of the first trace")
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1]))
    from built_schedulers import engine_config
    from connector_trace import ConnectorTrace

    logging.disable(logging.ERROR)  # vLLM logs every failed load
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            f"{name}_config": engine_config(Path(folder), backend)
            for name, backend in (("stock", "paged"), ("tagma", "tagma"))
        }
    totals: Counter[str] = Counter()
    began = time.monotonic()
    seed = arguments.seed
    while totals["operations"] < arguments.operations:
        mode = MODES[seed % len(MODES)]
        try:
            totals.update(ConnectorTrace(seed, mode=mode, alone=True, **configs).run())
        except Exception as error:
            error.add_note(f"seed {seed}, mode {mode}")
            raise
        totals["traces"] += 1
        seed += 1
    print(f"{time.monotonic() - began:.0f} s; nothing was touched while it was pinned")
    for name, count in sorted(totals.items()):
        print(f"{count:12,} {name}")


if __name__ == "__main__":
    main()
