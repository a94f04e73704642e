"""The real model through stock vLLM on both backends: the same tokens, the same cached tokens.

The workload (engine_run.py) has shared prefixes, multi-turn chats, prompts in chunks, a pool so
small that requests are preempted and resumed, and aborts in mid-flight. Range slots are compared
with the block table in every step of the tagma run, and all invariants are checked.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1900)]

Reports = dict[str, dict[str, Any]]


def test_each_run_used_its_backend(reports: Reports) -> None:
    assert reports["paged"]["manager"] == "KVCacheManager"
    assert reports["tagma"]["manager"] == "TagmaKVCacheManager"
    assert "KV-cache backend tagma" in reports["tagma"]["log"]


def test_workload_covers_what_it_claims(reports: Reports) -> None:
    """64 prompts or more, with hits, chunks, preemptions and aborts, or the comparison is idle."""
    for report in reports.values():
        requests = report["requests"]
        assert len(requests) >= 64
        assert sum(1 for r in requests.values() if r["cached"] > 0) >= 24
        assert report["chunked_steps"] > 0
        assert max(r["prompt_tokens"] for r in requests.values()) > 4 * 256
        assert report["preemptions"] >= 4
        assert not any(name in requests for name in ("abort-11", "abort-0", "abort-5", "abort-7"))


def test_greedy_tokens_are_identical(reports: Reports) -> None:
    paged, tagma = (reports[b]["requests"] for b in ("paged", "tagma"))
    assert paged.keys() == tagma.keys()
    different = [name for name in paged if paged[name]["tokens"] != tagma[name]["tokens"]]
    assert different == []
    assert all(paged[name]["finish"] == tagma[name]["finish"] for name in paged)


def test_cached_tokens_are_identical(reports: Reports) -> None:
    paged, tagma = (reports[b]["requests"] for b in ("paged", "tagma"))
    assert {n: r["cached"] for n, r in paged.items()} == {n: r["cached"] for n, r in tagma.items()}


def test_schedules_are_identical(reports: Reports) -> None:
    for key in ("steps", "preemptions", "chunked_steps"):
        assert reports["paged"][key] == reports["tagma"][key], key


def test_nothing_is_left_after_the_drain(reports: Reports) -> None:
    for report in reports.values():
        assert report["usage_after_drain"] == 0.0
        assert report["reset"] is True
    pool = reports["tagma"]["pool"]
    assert pool["rows"] == pool["live_blocks"] == pool["cached_blocks"] == 0
    assert pool["largest_hole_blocks"] == pool["capacity_blocks"]


def test_every_slot_equals_the_block_tables(reports: Reports) -> None:
    audit = reports["tagma"]["slot_audit"]
    prompt_tokens = sum(r["prompt_tokens"] for r in reports["tagma"]["requests"].values())
    assert audit["slots"] > prompt_tokens / 2  # prefix hits are not computed again
    assert audit["padded"] == 0


def test_requests_hold_no_more_ranges_than_paged_runs(reports: Reports) -> None:
    """A toy pool whose holes are made by exact LRU eviction only: the hardest case for ranges."""
    assert reports["tagma"]["mean_ranges"] <= reports["paged"]["mean_ranges"]
    assert reports["tagma"]["max_ranges"] <= 256
