"""Rules of the support matrix about families of models: what their layers keep of a token.

How rules are joined: ``rule_table.py``; what they ask: ``config_probes.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.support import config_probes as probe
from vllm_tagma.support.rule import Rule

_SHOWN = "tests/e2e/test_groups_same_tokens.py::test_tokens_hits_and_events_are_stocks"
_ALONE = "set --disable-hybrid-kv-cache-manager if some layers have full attention"

MODEL_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="mla",
        title="multi-head latent attention (MLA): DeepSeek-V2, V3 and their like",
        option="model architecture",
        status="served",
        why="one group; a block's latent vectors are copied as bytes. On a CPU without AMX vLLM "
        "itself turns prefix caching and chunked prompts off for it",
        proof=(f"{_SHOWN}[latent]",),
    ),
    Rule(
        id="sliding-window",
        title="sliding-window attention in every layer: Mistral",
        option="sliding_window of the model",
        status="served",
        why="a row's head is freed while its request runs, and hits are vLLM's",
        proof=(f"{_SHOWN}[window]",),
    ),
    Rule(
        id="mixed-windows",
        title="layers with a window, or chunked local attention, beside layers without: Gemma, "
        "gpt-oss, Llama 4 and their like",
        option="number of cache groups of the model",
        status="served",
        why="each KV-cache group has a row for each request, and all take blocks from one pool",
        proof=(
            f"{_SHOWN}[gemma3]",
            f"{_SHOWN}[gpt-oss]",
            f"{_SHOWN}[llama4]",
            "tests/manager/differential/test_group_traces.py::test_traces",
        ),
    ),
    Rule(
        id="window-retention",
        title="a prefix-cache retention interval with sliding windows",
        option="--prefix-cache-retention-interval",
        status="served",
        why="which blocks of a window enter the cache is vLLM's decision, block for block",
        proof=("tests/manager/differential/test_group_traces.py::test_traces",),
    ),
    Rule(
        id="without-hybrid-manager",
        title="the same as one group",
        option="--disable-hybrid-kv-cache-manager",
        status="served",
        why="vLLM then keeps the blocks of all layers as it does those of full attention",
        proof=(f"{_SHOWN}[gpt-oss-alone]",),
    ),
    # ---- not served ----
    Rule(
        id="sparse-mla",
        title="latent attention with an index or with a window (DeepSeek-V3.2, V4)",
        option="model architecture",
        status="planned",
        why="Beside a latent vector for each token they keep an index or a window of their own, "
        "and need a GPU",
        way_out="choose a model with plain latent attention, as DeepSeek-V2 and V3",
        in_config=probe.sparse_mla,
        in_cache=probe.special_mla,
    ),
    Rule(
        id="other-windows",
        title="chunked local attention without full attention, other kinds of windows",
        option="attention of the model",
        status="planned",
        why="vLLM takes and frees the blocks of such rows by rules that no test compares",
        way_out=f"{_ALONE} (the others then keep their blocks too), or choose another model",
        in_cache=probe.other_window,
    ),
    Rule(
        id="window-transfer",
        title="KV connectors beside sliding windows or chunks",
        option="window of the model",
        status="planned",
        why="No test compares what a connector sends of a row whose head is freed",
        way_out=f"{_ALONE}, or drop --kv-transfer-config",
        in_config=probe.window_beside("kv_transfer_config"),
    ),
    Rule(
        id="window-speculation",
        title="speculative decoding beside sliding windows or chunks",
        option="window of the model",
        status="planned",
        why="No test compares drafts beside rows whose heads are freed",
        way_out=f"{_ALONE}, or drop --speculative-config",
        in_config=probe.window_beside("speculative_config"),
    ),
    Rule(
        id="mamba",
        title="Mamba and hybrid models",
        option="model architecture",
        status="planned",
        why="State caches are not addressed by token",
        way_out="choose a model whose layers all have attention",
        in_config=probe.model_is("model_config.is_hybrid"),
        in_cache=probe.spec_of_kind(probe.MAMBA),
    ),
    Rule(
        id="cache-groups",
        title="KV-cache groups whose blocks differ in size",
        option="number of cache groups of the model",
        status="planned",
        why="All groups take their blocks from one pool, block for block",
        way_out=f"{_ALONE}, or choose another model",
        in_cache=probe.group_sizes,
    ),
)
