"""Rules of the support matrix about what is asked of a running engine, and how it is scheduled.

How rules are joined: ``rule_table.py``; what they ask: ``config_probes.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.support import config_probes as probe
from vllm_tagma.support.rule import Rule

_KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
_FEATURES = "tests/e2e/test_features_same_tokens.py"
_SAME = f"{_FEATURES}::test_both_backends_do_the_same"

FEATURE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="async-scheduling",
        title="asynchronous scheduling",
        option="--async-scheduling",
        status="served",
        why="copies are part of a step, and workers execute steps in order; vLLM itself turns it "
        "off on a CPU, so the tests force it",
        proof=(
            f"{_SAME}[async-Workload]",
            f"{_FEATURES}::test_asynchronous_v2_does_the_same",
            "tests/manager/differential/test_async_steps.py::test_late_steps_decide_as_stock",
            "tests/manager/differential/test_async_steps.py"
            "::test_late_steps_lose_nothing_to_live_moves",
        ),
    ),
    Rule(
        id="sampling",
        title="several answers to a prompt, prompt logprobs",
        option="n, prompt_logprobs",
        status="served",
        why="each answer is a request that shares its prompt's blocks",
        proof=(f"{_SAME}[sync-Samples]", f"{_SAME}[async-Samples]"),
    ),
    Rule(
        id="beam-search",
        title="beam search",
        option="LLM.beam_search, use_beam_search",
        status="served",
        why="each step of a beam is a request that hits the blocks of the last one",
        proof=(f"{_SAME}[sync-Beams]",),
    ),
    Rule(
        id="streamed-input",
        title="sessions with streamed input",
        option="AsyncLLM.generate with a generator of inputs",
        status="served",
        why="a session keeps its row between turns; its worker is sent the whole row again",
        proof=(
            f"{_SAME}[sync-Sessions]",
            f"{_SAME}[async-Sessions]",
            "tests/manager/differential/test_async_steps.py::test_late_steps_decide_as_stock",
        ),
    ),
    Rule(
        id="reset-while-running",
        title="resets of the prefix cache, while requests run too",
        option="reset_prefix_cache(reset_running_requests=True)",
        status="served",
        why="they are preempted and begin again in an empty cache",
        proof=(f"{_SAME}[sync-Resets]", f"{_SAME}[async-Resets]"),
    ),
    Rule(
        id="pooling",
        title="pooling models with causal attention: embeddings, token embeddings, classes",
        option="--runner pooling",
        status="served",
        why="their prompts are held and hit as those of other models",
        proof=(
            f"{_SAME}[embed-Pooling]",
            f"{_SAME}[token_embed-TokenPooling]",
            f"{_SAME}[classify-Classes]",
        ),
    ),
    Rule(
        id="kv-events-zeromq",
        title="KV-cache events over ZeroMQ",
        option="--kv-events-config with publisher zmq",
        status="served",
        why="a subscriber that replays them holds what the pool holds",
        proof=(f"{_FEATURES}::test_a_subscriber_replays_to_what_the_pool_holds",),
    ),
    Rule(
        id="kv-dtypes",
        title="KV-cache data types of one size for all tokens",
        option="--kv-cache-dtype auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2",
        status="served",
        why="a block's content is copied as bytes",
        proof=(
            f"{_SAME}[float16-Workload]",
            f"{_SAME}[fp8_e4m3-Workload]",
            f"{_SAME}[fp8_e5m2-Workload]",
            f"{_FEATURES}::test_data_types_of_the_cache_differ",
        ),
    ),
    # ---- not served ----
    Rule(
        id="kv-cache-dtype",
        title="other KV-cache data types",
        option="--kv-cache-dtype",
        status="planned",
        why=f"Served are {', '.join(_KV_DTYPES)}. With scales for each token and head "
        "(*_per_token_head) vLLM itself answers otherwise when it is asked again, so there is "
        "nothing to compare with; the others need a GPU",
        way_out="set --kv-cache-dtype auto or fp8",
        in_config=probe.unless("cache_config.cache_dtype", *_KV_DTYPES),
    ),
    Rule(
        id="microbatching",
        title="micro-batching (dual-batch overlap)",
        option="--enable-dbo or --ubatch-size",
        status="planned",
        why="vLLM splits batches on GPUs only: on a CPU it drops --enable-dbo by itself and "
        "rejects --ubatch-size; that one half reads what the other writes was not shown",
        way_out="drop --enable-dbo and set --ubatch-size 0",
        in_config=probe.unless("parallel_config.use_ubatching", False),
    ),
    Rule(
        id="weight-transfer",
        title="weight transfer into a running engine",
        option="--weight-transfer-config",
        status="planned",
        why="vLLM's transfer engines (NCCL, CUDA IPC, RDT) move weights between GPUs, which are "
        "not served yet",
        way_out="drop --weight-transfer-config",
        in_config=probe.if_set("weight_transfer_config", "backend"),
    ),
    Rule(
        id="sleep-mode",
        title="sleep mode",
        option="--enable-sleep-mode",
        status="planned",
        why="vLLM offers it on GPUs only ('Sleep mode is not supported on current platform'), "
        "which are not served yet",
        way_out="drop --enable-sleep-mode",
        in_config=probe.unless("model_config.enable_sleep_mode", False),
    ),
)
