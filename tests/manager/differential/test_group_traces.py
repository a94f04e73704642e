"""vLLM's coordinators and ours make the same decisions where a model has windows or several groups.

The traces of ``manager_trace`` on layouts of cache groups: the comparisons are those of
``test_manager_traces``, in each group, and which blocks of hits, new blocks and rows are null.
Sizes of windows, the retention interval and the tokens in flight that the admission gate assumes
change from trace to trace.
"""

from __future__ import annotations

import collections

import pytest
from manager_trace import Layout, run_manager_trace
from rerun import seed_is_told

FULL = None
LAYOUTS = {
    "window": Layout((0,)),
    "full+window": Layout((FULL, 0)),
    "full+2-windows": Layout((FULL, 0, 1)),
    "gpt-oss": Layout((0, FULL)),
    "gemma-3": Layout((FULL, 0, 0, 0, 0, 0)),
}
SEEDS = {"exact": 200, "idle": 60}
_totals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


@pytest.mark.parametrize("mode", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traces(layout: str, mode: str) -> None:
    """All seeds of a layout in one test; ``test_seed`` runs one of them again."""
    totals: collections.Counter[str] = collections.Counter()
    for seed in range(SEEDS[mode]):
        with seed_is_told("test_group_traces.py::test_traces", f"{mode}-{layout}, seed {seed}"):
            totals.update(run_manager_trace(seed, mode, LAYOUTS[layout]))
    print(layout, mode, dict(totals))
