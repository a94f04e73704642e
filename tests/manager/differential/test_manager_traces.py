"""vLLM's own manager and ours make the same decisions on random scheduler traces.

In two modes: "exact" moves nothing; "idle" moves cached blocks that no request holds, as many as it
likes. Both evict in stock's order (no slack), so moves must be invisible but for block ids. Live
moves may evict a few blocks ahead: ``test_kv_content.py`` holds them to the contract.

Equal after every call: whether ``allocate_slots`` gives blocks, how many, the free count, the
usage, hit lengths, row lengths, ``estimate_cached_tokens``, and the calls to the metrics collector
(allocated, accessed, reset). Equal after every step: the KV events, in content and order, the
prefix-cache statistics, the number of cached blocks. On our side also: the replayed event stream is
the resident set of the stock pool, ids are valid, a block has two owners only as a shared published
prefix block, the laws of ``check_invariants`` hold, and nothing is left when the trace ends.

Where the two differ, and what the test does about it:

1. *Block ids.* Placement is the product; ids are checked for validity, not for equality.
2. *Preemption in the step of publication* (vLLM #57580). What a request published in the very step
   in which it is preempted was never written. Ours withdraws it (with its ``BlockRemoved`` events);
   stock leaves it hittable. ``Pair.preempt`` withdraws the same blocks from stock.
3. *Withdrawn idle blocks.* ``evict_blocks`` (called when a KV connector failed to load) makes
   them holes here at once; stock leaves them at their place in the LRU order and so may evict
   cached blocks before reusing them. ``Pair.evict_blocks`` moves them to the front of stock's
   queue.
4. *Evictions seen by the metrics collector.* Stock ends a sampled block's life when its id is
   handed out again; ours also when it leaves the cache, since its id may stay in a hole. Only other
   calls are compared; on our side every accessed block must be alive.
5. *Slack.* By default some of the oldest idle blocks are evicted before their turn; it is set to
   zero here. ``test_kv_content.py`` runs such traces with slack against the contract.
6. *The cap of 256 ranges a row.* A hit in more than 127 ranges is cut, and a row that would exceed
   the cap evicts beyond the least recently used, or is refused. The traces assert that they stay
   below it.
"""

from __future__ import annotations

import collections

import pytest
from manager_trace import run_manager_trace
from rerun import seed_is_told

SEEDS = {"exact": 220, "idle": 90}


@pytest.mark.parametrize(
    ("mode", "seed"), [(mode, seed) for mode, count in SEEDS.items() for seed in range(count)]
)
def test_trace(mode: str, seed: int) -> None:
    with seed_is_told("test_manager_traces.py::test_trace", f"{mode}-{seed}"):
        run_manager_trace(seed, mode)


@pytest.mark.parametrize("mode", SEEDS)
def test_traces_reach_what_they_claim(mode: str) -> None:
    """Without this the traces could become idle and still pass."""
    totals: collections.Counter[str] = collections.Counter()
    for seed in range(20):
        totals.update(run_manager_trace(seed, mode))
    rare = {"withdrawn": 5, "session": 2, "evict_blocks": 50, "reset_prefix_cache": 40}
    common = {"preempt": 50, "refused": 500, "hit": 100, "free": 500, "cache_blocks": 200}
    moves = {"copies": 200} if mode == "idle" else {}
    assert {
        name: totals[name]
        for name, least in (rare | common | moves).items()
        if totals[name] < least
    } == {}
