"""Moves corrupt nothing: every request finds the KV that was written for it, in every mode.

A Python worker (``kv_worker.py``) executes the steps of random traces: tiny pools under pressure,
chunked prompts, preemption by order and by priority, aborts, prefixes shared in the same step,
sessions, drafts, resets of the cache, steps in flight. Our manager alone is driven
(``manager_solo.py``), so that budgets may be short and blocks may be evicted before their turn;
the contract is checked call by call. vLLM's own scheduler over the same worker is in
``differential/test_scheduler_traces.py``.
"""

from __future__ import annotations

import collections

import pytest
from canary_trace import CanaryTrace
from kv_worker import KvWorker, Step
from manager_solo import Solo

from vllm_tagma._native import BlockRanges
from vllm_tagma.row_update import RowUpdate

MODES = (
    "off/0/0.1",
    "idle/1/0.0",
    "idle/7/0.3",
    "live/2/0.05",
    "live/16/0.0",
    "live/16/0.3",
    "live/65536/0.0",
    "live/65536/0.05",
)
SEEDS = 6
OPERATIONS = 300
_totals: collections.Counter[str] = collections.Counter()


@pytest.mark.parametrize("overlapped", [False, True], ids=["in-step", "in-flight"])
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("mode", MODES)
def test_every_request_reads_what_was_written_for_it(
    mode: str, seed: int, overlapped: bool
) -> None:
    trace = CanaryTrace(2_000 + seed, overlapped=overlapped, pair=Solo, mode=mode)
    trace.run(OPERATIONS)
    assert trace.reads > 0
    _totals.update(trace.pair.tally)
    _totals["copied"] += trace.worker.copied
    _totals["rows moved"] += trace.worker.rows_moved


def test_traces_move_blocks() -> None:
    """Without this the traces could become idle and still pass."""
    if not _totals:
        test_every_request_reads_what_was_written_for_it("live/65536/0.0", 0, True)
    assert _totals["copied"] > 100
    assert _totals["rows moved"] > 10


def test_the_worker_sees_what_is_wrong() -> None:
    """Each thing that a step could get wrong is noticed, so that a pass means something."""
    copies = [(1, 2), (2, 1)]
    worker = KvWorker(num_blocks=4, block_size=1)
    worker.memory[:, 0] = [0, 10, 20, 30]

    def update(name: str, first: int, *ids: int) -> RowUpdate:
        return RowUpdate(name, 0, first, BlockRanges.from_ids(list(ids)))

    worker.execute(Step(copies, [update("a", 0, 3)], set(), {"a": [3]}, {}, []))
    assert worker.memory[:, 0].tolist() == [0, 20, 10, 30]  # sources first, as on a device
    with pytest.raises(AssertionError, match="two copies into one block"):
        worker.execute(Step([(1, 2), (3, 2)], [], set(), {}, {}, []))
    for updates, more, message in (
        ([update("b", 0, 1)], {}, "b is not held by the worker"),
        ([update("a", 0, 1, 2)], {}, r"holds \[3\] \+ \[\], not \[1, 2\]"),
        ([update("a", 2, 1)], {"a": [1]}, r"holds \[3\], its update begins at 2"),
        ([update("a", 1, 1)], {"a": [2]}, r"has \[3, 1\], and the ids beside it say \[2\]"),
        ([update("a", 0, 1), update("a", 0, 1)], {}, "two updates of a"),
        ([], {"a": [1]}, "no update of {'a'}"),
    ):
        with pytest.raises(AssertionError, match=message):
            worker.execute(Step([], updates, set(), {}, more, []))
    worker.execute(Step([], [update("a", 0, 2, 1)], set(), {}, {"a": [1]}, []))
    assert (worker.rows, worker.rows_moved) == ({"a": [2, 1]}, 1)


@pytest.mark.parametrize("lost", ["nothing", "a copy", "a move", "a moved row that grew"])
def test_a_lost_move_is_read(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace fails when a step loses a copy, or the part of an update in front of new blocks."""
    execute = KvWorker.execute

    def lossy(self: KvWorker, step: Step) -> None:
        if lost == "a copy":
            del step.copies[:1]
        for at, (name, group, first, ranges) in enumerate(step.updates or ()):
            held, new = len(self.rows.get(name, ())), len(step.more.get(name, ()))
            if name in step.whole or first >= held:
                continue
            if lost == "a move" and not new:
                del step.updates[at]
                break
            if lost == "a moved row that grew" and new:
                end = ranges.sliced(len(ranges) - new, len(ranges))
                step.updates[at] = RowUpdate(name, group, held, end)
        execute(self, step)

    monkeypatch.setattr(KvWorker, "execute", lossy)

    def run() -> None:
        for seed in range(2_000, 2_010):
            CanaryTrace(seed, overlapped=False, pair=Solo, mode="live/65536/0.0").run(OPERATIONS)

    if lost == "nothing":
        run()
    else:
        with pytest.raises(AssertionError):
            run()
