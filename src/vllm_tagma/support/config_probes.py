"""The questions that the support matrix asks a configuration. The rules: ``rule_table.py``.

Each probe looks into a ``VllmConfig`` or a ``KVCacheConfig`` and returns the offending value as
text, or ``None``. An attribute that one vLLM release does not have counts as not set. vLLM's
classes are told by name, so that no probe imports vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

from vllm_tagma.class_names import CPU_WORKER, GPU_WORKER, SCHEDULERS, WORKERS
from vllm_tagma.config import TagmaConfig
from vllm_tagma.support.rule import Find


def attribute(config: Any, path: str) -> Any:
    """``config.a.b`` for ``"a.b"``; ``None`` where an attribute on the way is absent or None."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def unless(path: str, *served: object) -> Find:
    """Finds the value at ``path`` unless it is absent, None, or one of ``served``."""

    def find(config: Any) -> str | None:
        value = attribute(config, path)
        if value is None or value in served:
            return None
        return value if isinstance(value, str) else repr(value)

    return find


def model_is(path: str) -> Find:
    """Finds that the flag at ``path`` is true; shows the model's architecture."""

    def find(config: Any) -> str | None:
        if not attribute(config, path):
            return None
        return str(attribute(config, "model_config.architecture") or "of that kind")

    return find


def if_not_empty(path: str) -> Find:
    """Finds a collection at ``path`` that has entries."""

    def find(config: Any) -> str | None:
        value = attribute(config, path)
        return str(value) if value else None

    return find


def if_set(path: str, show: str = "") -> Find:
    """Finds that the object at ``path`` is present; shows its attribute ``show``."""

    def find(config: Any) -> str | None:
        value = attribute(config, path)
        if value is None:
            return None
        shown = attribute(value, show) if show else None
        return "set" if shown is None else str(shown)

    return find


def _method(config: Any) -> str | None:
    """How a configuration drafts, as vLLM finished it: every kind of MTP is "mtp"."""
    found = attribute(config, "speculative_config.method")
    return None if found is None else str(found)


def speculation(*methods: str) -> Find:
    """Finds one of these methods of speculative decoding."""

    def find(config: Any) -> str | None:
        found = _method(config)
        return found if found in methods else None

    return find


def other_speculation(known: Collection[str]) -> Find:
    """Finds a method of speculative decoding that is not ``known``."""

    def find(config: Any) -> str | None:
        found = _method(config)
        return None if found is None or found in known else found

    return find


def v2_speculation(config: Any) -> str | None:
    drafts = _method(config) is not None and attribute(config, "use_v2_model_runner")
    return f"True while --speculative-config is {_method(config)}" if drafts else None


def multi_module_mtp(config: Any) -> str | None:
    ahead = attribute(config, "num_prefill_lookahead_tokens") or 0
    return None if ahead <= 1 else f"{_method(config)} with {ahead} modules"


def parallel_drafting(config: Any) -> str | None:
    if _method(config) in ("dflash", "dspark"):
        return None  # that rule speaks
    return "True" if attribute(config, "speculative_config.parallel_drafting") else None


def prefix_match_unit(config: Any) -> str | None:
    unit = attribute(config, "cache_config.prefix_match_unit")
    block_size = attribute(config, "cache_config.block_size")
    return None if unit in (None, block_size) else f"{unit} with a block size of {block_size}"


def _window(config: Any) -> str | None:
    """The window, or chunk, of a model some or all of whose layers have one, as vLLM holds them."""
    kinds = attribute(config, "model_config.hf_text_config.layer_types") or ()
    layers = [str(kind) for kind in kinds]
    alone = attribute(config, "scheduler_config.disable_hybrid_kv_cache_manager")
    chunk = attribute(config, "model_config.attention_chunk_size")
    if chunk is not None and not alone:
        return f"{chunk} tokens a chunk"
    window = attribute(config, "model_config.hf_text_config.sliding_window")
    if window is None:
        return None
    mixed = any("sliding" in kind for kind in layers)
    if mixed and any("full" in kind for kind in layers) and alone:
        return None  # vLLM then holds the layers with a window as those without
    if attribute(config, "cache_config.sliding_window") is not None:
        return f"{window} tokens"
    return f"{window} tokens in some layers" if mixed else None


def window_beside(path: str) -> Find:
    """Finds a window while the object at ``path`` is present."""

    def find(config: Any) -> str | None:
        return None if attribute(config, path) is None else _window(config)

    return find


def retention_without_window(config: Any) -> str | None:
    if _window(config) is not None:
        return None
    return unless("cache_config.prefix_cache_retention_interval", 0)(config)


def scheduler_class(config: Any) -> str | None:
    given = attribute(config, "scheduler_config.scheduler_cls")
    return None if given is None or given in SCHEDULERS.values() else str(given)


def worker_class(config: Any) -> str | None:
    given = attribute(config, "parallel_config.worker_cls")
    v2 = bool(attribute(config, "use_v2_model_runner"))
    if (given, v2) in WORKERS or given in WORKERS.values():
        return None
    return f"{given} with Model Runner V1" if given == GPU_WORKER else str(given)


def engines_with_experts(config: Any) -> str | None:
    """Finds data-parallel engines that are one group, as they are for a mixture of experts."""
    if not attribute(config, "model_config.is_moe"):
        return None
    return unless("parallel_config.data_parallel_size", 1)(config)


def _runs_on(config: Any, platform_worker: str) -> bool:
    """True for vLLM's worker of a platform, and for the one that takes its place."""
    given = attribute(config, "parallel_config.worker_cls")
    return given in {platform_worker} | {
        ours for (stock, _), ours in WORKERS.items() if stock == platform_worker
    }


def untested_gpu(config: Any) -> str | None:
    if not _runs_on(config, GPU_WORKER) or _options(config).self_test != "off":
        return None
    return str(attribute(config, "parallel_config.worker_cls"))


def v2_on_cpu(config: Any) -> str | None:
    if not attribute(config, "use_v2_model_runner") or not _runs_on(config, CPU_WORKER):
        return None
    if not _options(config).v2_interpreter:
        return "True"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if interpreted else "True while TRITON_INTERPRET is not 1"


def _options(config: Any) -> TagmaConfig:
    return TagmaConfig.from_sources(getattr(config, "additional_config", None))


def alignment(config: Any) -> str | None:
    found = _options(config).alignment
    return None if found == 1 else f"{found} blocks"


# ---- KVCacheConfig ------------------------------------------------------------------------------


def _groups(cache: Any) -> list[Any]:
    return list(cache.kv_cache_groups)


def retention_without_window_group(cache: Any) -> str | None:
    if spec_of_kind(("SlidingWindowSpec",))(cache):
        return None
    return unless("prefix_cache_retention_interval", 0)(cache)


def group_sizes(cache: Any) -> str | None:
    groups = _groups(cache)
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if not groups:
        return "0"
    return None if len(sizes) == 1 else f"{len(groups)}, with blocks of {sizes} tokens"


def other_window(cache: Any) -> str | None:
    """Finds windows that are not plain: rings, tokens kept beyond the window, chunks that end
    inside a block or that no full attention stands beside."""
    full = spec_of_kind(("FullAttentionSpec",))(cache)
    for group in _groups(cache):
        spec = group.kv_cache_spec
        name = type(spec).__name__
        if not _lineage(spec) & {*WINDOWED} or _lineage(spec) & {*MLA}:
            continue
        if name == "ChunkedLocalAttentionSpec":
            chunk, block_size = spec.attention_chunk_size, spec.block_size
            if chunk % block_size:
                return f"{name} with chunks of {chunk} tokens and blocks of {block_size}"
            if full is None:
                return f"{name} in every layer"
        elif name != "SlidingWindowSpec":
            return name
        elif kept := getattr(spec, "extra_retained_tokens", 0):
            return f"{name} with extra_retained_tokens={kept}"
    return None


def _lineage(spec: Any) -> set[str]:
    return {base.__name__ for base in type(spec).__mro__}


def spec_of_kind(kinds: Iterable[str]) -> Find:
    """Finds a group whose spec is, or derives from, one of ``kinds`` (class names)."""
    wanted = set(kinds)

    def find(cache: Any) -> str | None:
        for group in _groups(cache):
            if _lineage(group.kv_cache_spec) & wanted:
                return type(group.kv_cache_spec).__name__
        return None

    return find


MLA = ("MLAAttentionSpec", "SlidingWindowMLASpec")
WINDOWED = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec", "RSWASpec", "CircularBufferSpec")
MAMBA = ("MambaSpec",)
CROSS = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec")
_NAMED = {*MLA, *WINDOWED, *MAMBA, *CROSS}


def special_mla(cache: Any) -> str | None:
    """Finds latent attention that keeps more, or something else, than one vector a token."""
    for group in _groups(cache):
        spec = group.kv_cache_spec
        name = type(spec).__name__
        if not _lineage(spec) & set(MLA):
            continue
        if name != MLA[0]:
            return name
        role = getattr(spec, "cache_role", "sparse")
        for field, value, plain in (
            ("model_version", getattr(spec, "model_version", None), None),
            ("alignment", getattr(spec, "alignment", None), None),
            ("cache_role", getattr(role, "value", role), "sparse"),
            ("tokens_per_state", getattr(spec, "tokens_per_state", 1), 1),
            ("non_causal", getattr(spec, "non_causal", False), False),
        ):
            if value != plain:
                return f"{name} with {field}={value}"
    return None


def sparse_mla(config: Any) -> str | None:
    """Finds latent attention that chooses the tokens it looks at by an index."""
    if attribute(config, "model_config.hf_text_config.index_topk") is None:
        return None
    return str(attribute(config, "model_config.architecture"))


def other_spec(cache: Any) -> str | None:
    for group in _groups(cache):
        spec = group.kv_cache_spec
        if _lineage(spec) & _NAMED:
            continue  # a rule of its own speaks
        if type(spec).__name__ != "FullAttentionSpec":
            return type(spec).__name__
        if getattr(spec, "non_causal", False):
            return "FullAttentionSpec with non_causal=True"
        if getattr(spec, "tokens_per_state", 1) != 1:
            return f"FullAttentionSpec with tokens_per_state={spec.tokens_per_state}"
    return None


def special_group(cache: Any) -> str | None:
    for group in _groups(cache):
        role = getattr(group, "role", "default")
        if getattr(role, "value", role) != "default":
            return f"role={getattr(role, 'value', role)}"
        if getattr(group, "host_resident", False):
            return "host_resident=True"
        if not getattr(group.kv_cache_spec, "prefix_cacheable", True):
            return "prefix_cacheable=False"
        replay = getattr(group.kv_cache_spec, "prefix_replay_tokens", 0)
        if replay:
            return f"prefix_replay_tokens={replay}"
    if getattr(cache, "hisparse_host_num_blocks", None) is not None:
        return f"hisparse_host_num_blocks={cache.hisparse_host_num_blocks}"
    return None


def hash_block_size(cache: Any) -> str | None:
    hashed = getattr(cache, "hash_block_size", None)
    sizes = {group.kv_cache_spec.block_size for group in _groups(cache)}
    if hashed is None or len(sizes) != 1 or hashed in sizes:
        return None
    return f"{hashed} tokens with a block size of {sizes.pop()}"


def zeroing(cache: Any) -> str | None:
    return "required" if getattr(cache, "needs_kv_cache_zeroing", False) else None
