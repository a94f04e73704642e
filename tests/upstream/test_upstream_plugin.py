"""The plugin on tests like vLLM's: each kind of outcome gets the class that it should."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from upstream_classes import Observation, Verdict, classify
from upstream_run import environment_of

# In a folder called tests, as vLLM's are: the classes depend on who reads a member.
SAMPLE = """
import pytest
import torch
import vllm.v1.core.kv_cache_manager as stock
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec,
)

def manager(kind=FullAttentionSpec, **changes):
    spec = kind(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32, **changes)
    config = KVCacheConfig(
        num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=64, scheduler_block_size=4, hash_block_size=4, enable_caching=False
    )

def test_pass():
    assert manager().usage == 0

def test_untouched():
    assert stock.KVCacheBlocks(((),)).get_block_ids() == ([],)

def test_schedulers_module_keeps_vllms_manager():
    import vllm.v1.core.sched.scheduler as module
    assert module.Scheduler.__name__ == "TagmaScheduler"
    assert module.KVCacheManager is not KVCacheManager

def test_refused():
    manager(ChunkedLocalAttentionSpec, attention_chunk_size=8)

def test_refused_where_an_error_is_expected():
    with pytest.raises(ValueError):
        manager(ChunkedLocalAttentionSpec, attention_chunk_size=8)

def test_refused_with_other_words():
    with pytest.raises(ValueError, match="words of vLLM"):
        manager(ChunkedLocalAttentionSpec, attention_chunk_size=8)

def test_peeks_at_a_manager():
    manager().cache_salt_of_blocks

def test_peeks_at_a_pool():
    manager().block_pool.free_block_queue

def test_peeks_at_blocks():
    list(manager().empty_kv_cache_blocks.blocks[0])

def test_differs():
    assert manager().usage == 1

def test_differs_by_a_result_that_is_none():
    manager().get_blocks("unknown").get_block_ids(allow_none=True)[0]

def test_differs_after_a_refusal():
    with pytest.raises(ValueError):
        manager(ChunkedLocalAttentionSpec, attention_chunk_size=8)
    assert manager().usage == 1

def test_differs_by_its_own_mistake():
    manager()
    open("/nowhere/at/all")

def test_breaks_a_law():
    class Broken:
        def check_invariants(self):
            raise RuntimeError("law Z: 1 is not 2")

    manager().pool = Broken()

def test_builds_the_stock_manager():
    name = "vllm.v1.core.kv_cache_manager"
    build = [c for c in object.__subclasses__() if c.__name__ == "KVCacheManager"]
    (stock_class,) = [c for c in build if c.__module__ == name]
    stock_class(
        manager().kv_cache_config, max_model_len=64, scheduler_block_size=4, hash_block_size=4
    )

@pytest.mark.skip(reason="no reason")
def test_skipped():
    pass
"""

CLASSES = {
    "pass": "pass",
    "untouched": "untouched",
    "schedulers_module_keeps_vllms_manager": "untouched",
    "refused": "refused",
    "refused_where_an_error_is_expected": "pass",
    "refused_with_other_words": "refused",
    "peeks_at_a_manager": "peeks",
    "peeks_at_a_pool": "peeks",
    "peeks_at_blocks": "peeks",
    "differs": "differs",
    "differs_by_a_result_that_is_none": "differs",
    "differs_after_a_refusal": "differs",
    "differs_by_its_own_mistake": "differs",
    "breaks_a_law": "differs",
    "builds_the_stock_manager": "differs",
    "skipped": "differs",
}
REASONS = {
    "refused": "chunked local attention without full attention",
    "refused_where_an_error_is_expected": "is refused where vLLM raises",
    "peeks_at_a_manager": "TagmaKVCacheManager.cache_salt_of_blocks",
    "peeks_at_a_pool": "BlockPool.free_block_queue",
    "peeks_at_blocks": "BlockRanges.__iter__",
    "differs": "AssertionError: assert 0.0 == 1",
    "breaks_a_law": "InvariantError: law Z: 1 is not 2",
    "builds_the_stock_manager": "vLLM's own manager was built: the replacement missed it",
}


@pytest.fixture(scope="module", params=[(), ("-n", "1")], ids=["one process", "a worker"])
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Verdict]:
    folder = tmp_path_factory.mktemp("sample")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_sample.py").write_text(SAMPLE, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    results = folder / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *request.param]
    command += ["-p", "upstream_plugin", "--upstream-backend=tagma"]
    command += [f"--upstream-results={results}", "tests"]
    environment = environment_of("tagma", models=folder / "models")
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stdout + run.stderr
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert "finished" in lines.pop()
    seen = [Observation(**line) for line in lines]
    return {test.test.rpartition("::test_")[2]: classify(test) for test in seen}


def test_each_outcome_has_its_class(verdicts: dict[str, Verdict]) -> None:
    assert {test: verdict.name for test, verdict in verdicts.items()} == CLASSES


def test_each_class_has_its_reason(verdicts: dict[str, Verdict]) -> None:
    for test, reason in REASONS.items():
        assert verdicts[test].reason.startswith(reason), test
