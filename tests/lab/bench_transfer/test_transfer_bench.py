"""The pairs of two churned pools, and the command that posts them through the real NIXL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prerequisites import require_nixl

pytest.importorskip("vllm")

from vllm_tagma.lab.bench_transfer.transfer_pairs import pair_blocks
from vllm_tagma.lab.bench_transfer.transfer_run import outside_longest_range
from vllm_tagma.lab.replay import loads
from vllm_tagma.lab.replay.replay_settings import Settings, pool_blocks
from vllm_tagma.lab.report.report_command import write_report
from vllm_tagma.transfer.joint_runs import joint_runs

SETTINGS = Settings(max_num_seqs=8, memory="1.3x")


@pytest.fixture(scope="module")
def pools():
    requests = loads.generate("chat", requests=300, running=8, seed=3).requests
    num_blocks = pool_blocks(SETTINGS, requests)
    made = {
        backend: pair_blocks(backend, requests, SETTINGS, num_blocks=num_blocks)
        for backend in ("paged", "tagma")
    }
    return requests, num_blocks, made


def test_a_transfer_pairs_the_blocks_of_a_prompt_that_the_decoder_has_not(pools):
    requests, num_blocks, made = pools
    for pool in made.values():
        assert len(pool.pairs) > 200
        for pair in pool.pairs:
            prompt = -(-requests[pair.request].prompt_tokens // SETTINGS.block_size)
            assert 0 < len(pair.local) == len(pair.remote) <= prompt
            for side in (pair.local, pair.remote):
                assert len(np.unique(side)) == len(side)
                assert side.min() > 0
                assert side.max() < num_blocks
        assert {pair.fresh for pair in pool.pairs} == {True, False}
        assert any(
            len(pair.local) < -(-requests[pair.request].prompt_tokens // SETTINGS.block_size)
            for pair in pool.pairs
        ), "some of the conversations' history is in the decoder's cache"


def test_pools_of_ranges_pair_in_fewer_runs(pools):
    runs = {
        backend: [joint_runs(p.local, p.remote).num_runs for p in pool.pairs if not p.fresh]
        for backend, pool in pools[2].items()
    }
    assert np.mean(runs["tagma"]) < 2
    assert np.mean(runs["paged"]) > 20 * np.mean(runs["tagma"])


def test_what_a_gathering_sender_would_copy():
    row = np.array([7, 8, 20, 21, 22, 3])
    assert outside_longest_range(row).tolist() == [7, 8, 3]
    assert outside_longest_range(np.arange(5, 9)).tolist() == []


def test_the_command_counts_what_it_posts(tmp_path: Path):
    require_nixl()
    result = tmp_path / "result.json"
    tagma = Path(sys.executable).with_name("tagma")
    command = [str(tagma), "bench", "transfer", "--limit", "120", "--samples", "4"]
    command += ["--regions", "3", "--block-bytes", "64", "--json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "churned decode pool" in run.stdout
    written = write_report([result], tmp_path / "report")
    page, text = (path.read_text() for path in written)
    for words in ("KV transfer costs", "churned decode pool", "Gathering the sender's blocks"):
        assert words in page
        assert words in text
    stages = json.loads(result.read_text())["stages"]
    assert stages.keys() == {"fresh", "churned"}
    for stage in stages.values():
        arms, gather = stage["arms"], stage["gather"]
        assert gather["saved_runs"] == arms["both"]["joint_runs"] - arms["both"]["decode_ranges"]
        # A sender whose row has several ranges would copy at least one block of each but one.
        more = arms["both"]["prefill_ranges"] - stage["requests"]
        assert more <= gather["copied_blocks"] < arms["both"]["blocks"]
        for name in ("connector", "both"):
            assert sum(arms[name]["descriptors"]) == arms[name]["joint_runs"] * 3
        assert sum(arms["connector"]["descriptors"]) <= sum(arms["stock"]["descriptors"])
        for one, other in (("stock", "connector"), ("pool", "both")):
            assert (
                arms[one]["num_bytes"] == arms[other]["num_bytes"] == arms[one]["blocks"] * 3 * 64
            )
