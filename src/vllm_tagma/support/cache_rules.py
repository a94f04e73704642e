"""Rules about what a request's blocks mean and how the cache holds them.

How rules are joined: ``rule_table.py``; what they ask: ``config_probes.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.support import config_probes as probe
from vllm_tagma.support.rule import Rule

_ONE_GROUP = "The manager holds groups of attention layers"
_DROP = "drop the option"

CACHE_RULES: Final[tuple[Rule, ...]] = (
    # ---- not served: what a request's blocks mean ----
    Rule(
        id="diffusion",
        title="diffusion language models",
        option="--diffusion-config",
        status="refused",
        why="They need a scheduler of their own",
        way_out="choose another model",
        in_config=probe.if_set("diffusion_config"),
    ),
    Rule(
        id="encoder-decoder",
        title="encoder-decoder models",
        option="model architecture",
        status="refused",
        why="Cross attention keeps a second cache per request",
        way_out="choose a decoder-only model",
        in_config=probe.model_is("model_config.is_encoder_decoder"),
    ),
    Rule(
        id="encoder-only-multimodal",
        title="serving only a multimodal encoder",
        option="--mm-encoder-only",
        status="refused",
        why="There is no KV cache to hold",
        way_out="drop --mm-encoder-only",
        in_config=probe.unless("is_mm_encoder_only", False),
    ),
    Rule(
        id="attention-free",
        title="attention-free models",
        option="model architecture",
        status="refused",
        why="There is no KV cache to hold",
        way_out="choose another model",
        in_config=probe.model_is("model_config.is_attention_free"),
    ),
    Rule(
        id="cross-attention",
        title="cross attention and encoder-only attention",
        option="attention of the model",
        status="refused",
        why=_ONE_GROUP,
        way_out="choose a decoder-only model",
        in_cache=probe.spec_of_kind(probe.CROSS),
    ),
    Rule(
        id="other-attention",
        title="kinds of KV cache other than plain full attention",
        option="attention of the model",
        status="planned",
        why="Each kind has rules of its own for what a row keeps",
        way_out="choose a model with plain full attention",
        in_cache=probe.other_spec,
    ),
    Rule(
        id="special-group",
        title="KV-cache groups with a special role",
        option="cache group of the model",
        status="refused",
        why=f"{_ONE_GROUP}, on the device, cacheable and without replay",
        way_out="choose another model",
        in_cache=probe.special_group,
    ),
    Rule(
        id="engram",
        title="Engram layers",
        option="--engram-config",
        status="refused",
        why="They keep a memory of their own beside the KV cache",
        way_out="choose another model",
        in_config=probe.if_set("engram_config"),
    ),
    Rule(
        id="sparse-indexer",
        title="the context-parallel sparse indexer",
        option="--attention-config.minimax_m3_indexer_cp",
        status="planned",
        why="It keeps an index cache beside the KV cache",
        way_out=_DROP,
        in_config=probe.unless("attention_config.minimax_m3_indexer_cp", False),
    ),
    # ---- not served: options of the cache ----
    Rule(
        id="kv-dtype-skip-layers",
        title="KV-cache data types that differ between layers",
        option="--kv-cache-dtype-skip-layers",
        status="planned",
        why="Mixed precisions need blocks to be zeroed before use",
        way_out="drop --kv-cache-dtype-skip-layers",
        in_config=probe.if_not_empty("cache_config.kv_cache_dtype_skip_layers"),
    ),
    Rule(
        id="zeroing",
        title="caches whose new blocks must be zeroed",
        option="zeroing of new blocks",
        status="planned",
        why="The manager does not report new blocks for zeroing",
        way_out="choose a model with one kind of attention and one KV-cache data type",
        in_cache=probe.zeroing,
    ),
    Rule(
        id="prefix-match-unit",
        title="a prefix match unit other than the block size",
        option="--prefix-match-unit",
        status="refused",
        why="Hits of a full-attention group land on block boundaries",
        way_out="drop --prefix-match-unit",
        in_config=probe.prefix_match_unit,
        in_cache=probe.hash_block_size,
    ),
    Rule(
        id="retention-interval",
        title="a prefix-cache retention interval without sliding windows",
        option="--prefix-cache-retention-interval",
        status="refused",
        why="There is no sliding-window or Mamba group that it could concern",
        way_out="drop --prefix-cache-retention-interval",
        in_config=probe.retention_without_window,
        in_cache=probe.retention_without_window_group,
    ),
    Rule(
        id="fast-prefill",
        title="KV-sharing fast prefill",
        option="--kv-sharing-fast-prefill",
        status="planned",
        why="Not tested",
        way_out="drop --kv-sharing-fast-prefill",
        in_config=probe.unless("cache_config.kv_sharing_fast_prefill", False),
    ),
    Rule(
        id="alignment",
        title="an alignment other than one block",
        option="additional_config['tagma']['alignment']",
        status="planned",
        why="The core keeps the contract, but no kernel profits from it and it was not served",
        way_out="set it to 1",
        in_config=probe.alignment,
    ),
)
