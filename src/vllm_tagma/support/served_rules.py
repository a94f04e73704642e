"""What is served. How rules are joined: ``rule_table.py``."""

from __future__ import annotations

from typing import Final

from vllm_tagma.support.rule import Rule

SERVED_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="cpu-worker",
        title="the CPU backend of vLLM (Model Runner V1)",
        option="vllm.v1.worker.cpu_worker.CPUWorker",
        status="served",
        why="slots are computed by range arithmetic; attention reads the block table",
        proof=(
            "tests/e2e/test_same_tokens.py::test_greedy_tokens_are_identical",
            "tests/e2e/test_same_tokens.py::test_every_slot_equals_the_block_tables",
        ),
    ),
    Rule(
        id="prefix-caching",
        title="prefix caching, on or off",
        option="--[no-]enable-prefix-caching",
        status="served",
        why="same hits as vLLM; all its hash functions",
        proof=(
            "tests/e2e/test_same_tokens.py::test_cached_tokens_are_identical",
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[no-prefix-caching]",
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[sha256-cbor]",
        ),
    ),
    Rule(
        id="chunked-prefill",
        title="chunked prefill, on or off",
        option="--[no-]enable-chunked-prefill",
        status="served",
        why="a prompt's blocks grow in place where the next blocks are free",
        proof=(
            "tests/e2e/test_same_tokens.py::test_schedules_are_identical",
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[no-chunked-prefill]",
        ),
    ),
    Rule(
        id="priority",
        title="priority scheduling and preemption",
        option="--scheduling-policy priority",
        status="served",
        why="a request preempted in the step that published its blocks leaves no hits behind",
        proof=(
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[priority]",
            "tests/manager/differential/test_scheduler_traces.py::test_trace",
            "tests/manager/test_user_complaints.py::test_what_a_preempted_step_published_is_not_hit",
        ),
    ),
    Rule(
        id="watermark",
        title="allocation watermark and full-prompt reservation",
        option="--watermark, --scheduler-reserve-full-isl",
        status="served",
        why="free blocks are counted exactly; holes never refuse a request",
        proof=(
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[watermark]",
            "tests/manager/differential/test_scheduler_traces.py::test_trace",
        ),
    ),
    Rule(
        id="lora",
        title="LoRA adapters",
        option="--enable-lora",
        status="served",
        why="the adapter is part of vLLM's block hashes, which are compared, never tokens",
        proof=(
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[lora]",
            "tests/manager/test_prefix_semantics.py::test_each_identity_hits_itself_only",
        ),
    ),
    Rule(
        id="multimodal",
        title="multimodal inputs and cache salts",
        option="mm_processor_kwargs, cache_salt",
        status="served",
        why="also part of the block hashes",
        proof=(
            "tests/manager/test_prefix_semantics.py::test_each_identity_hits_itself_only",
            "tests/manager/test_prefix_semantics.py::test_an_image_parts_prompts_only_from_its_block_on",
        ),
    ),
    Rule(
        id="structured-output",
        title="structured output",
        option="structured_outputs",
        status="served",
        why="does not touch KV-cache blocks",
        proof=(
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[structured-output]",
        ),
    ),
    Rule(
        id="quantised-weights",
        title="quantised weights",
        option="--quantization",
        status="served",
        why="does not touch KV-cache blocks",
        proof=(
            "tests/e2e/test_config_same_tokens.py::test_tokens_and_hits_are_stocks[int8-weights]",
        ),
    ),
    Rule(
        id="kv-events",
        title="KV-cache events",
        option="--kv-events-config",
        status="served",
        why="the stream replays to the resident set",
        proof=(
            "tests/manager/test_user_complaints.py::test_the_event_stream_replays_to_what_can_be_hit",
            "tests/manager/differential/test_manager_traces.py::test_trace",
        ),
    ),
    Rule(
        id="kv-metrics",
        title="KV-cache residency metrics",
        option="--kv-cache-metrics",
        status="served",
        why="the collector sees every allocation, access and eviction",
        proof=(
            "tests/manager/differential/test_manager_traces.py::test_trace",
            "tests/manager/test_moves.py::test_samples_of_a_trace_stay_with_their_blocks",
        ),
    ),
    Rule(
        id="tensor-parallel",
        title="tensor parallelism",
        option="--tensor-parallel-size",
        status="served",
        why="each rank gets every row update and every copy, in order; compared rank by rank",
        proof=(
            "tests/e2e/test_ranks_same_tokens.py::test_tokens_and_hits_are_identical[tensor-rank-1-slow]",
            "tests/e2e/test_ranks_same_tokens.py::test_kv_of_each_rank_is_identical_after_each_step[tensor-rank-0-slow]",
            "tests/e2e/test_load.py::test_a_load_leaves_nothing_behind_and_changes_no_token",
        ),
    ),
    Rule(
        id="pipeline-parallel",
        title="pipeline parallelism",
        option="--pipeline-parallel-size",
        status="served",
        why="each stage works off its steps in order, so blocks may move and be reused in flight",
        proof=(
            "tests/e2e/test_ranks_same_tokens.py::test_tokens_and_hits_are_identical[pipeline-rank-1-slow]",
            "tests/e2e/test_ranks_same_tokens.py::test_blocks_moved_and_changed_hands_in_flight[pipeline-rank-0-slow]",
        ),
    ),
    Rule(
        id="data-parallel",
        title="data parallelism",
        option="--data-parallel-size",
        status="served",
        why="each engine has a pool of its own; metrics carry its number",
        proof=(
            "tests/e2e/test_data_parallel.py::test_tokens_and_hits_are_identical",
            "tests/e2e/test_data_parallel.py::test_metrics_tell_the_engines_apart",
        ),
    ),
)
