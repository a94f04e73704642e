"""The KV-cache groups of a model, as the manager needs them: rules of each, and what they share.

All groups take blocks of one size from one pool. Full attention keeps every block of a row; a
window (sliding, or chunks of local attention) lets go of the head while its request runs
(``group_needs.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_tagma import support
from vllm_tagma.group_hits import LookupGroup
from vllm_tagma.group_needs import ChunkNeeds, HeadNeeds, WindowNeeds
from vllm_tagma.group_spec import GroupSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class CacheGroup(NamedTuple):
    """One group. ``window``: how its rows lose their heads; None for full attention."""

    spec: KVCacheSpec
    window: HeadNeeds | None

    @property
    def pool_group(self) -> GroupSpec:
        """The group as the core knows it."""
        return GroupSpec() if self.window is None else self.window.pool_group


class CacheGroups(NamedTuple):
    """All groups of a model, in vLLM's order.

    ``retention``: vLLM's ``prefix_cache_retention_interval``, in tokens; see
    :meth:`WindowNeeds.cached_spans`.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    retention: int | None

    @classmethod
    def of_config(
        cls, kv_cache_config: KVCacheConfig, *, max_in_flight_tokens: int, max_model_len: int
    ) -> CacheGroups:
        """Reads a model's configuration, which the gates of ``support/`` let pass.

        Raises:
            UnsupportedError: blocks of several sizes, or a group of another kind.
        """
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        block_size: int = specs[0].block_size
        for spec in specs:
            if spec.block_size != block_size:
                given = f"block sizes {block_size} and {spec.block_size}"
                support.refuse("cache-groups", given, option="cache groups of the model")
        return cls(
            tuple(
                CacheGroup(spec, _window_of(spec, max_in_flight_tokens, max_model_len))
                for spec in specs
            ),
            block_size,
            kv_cache_config.prefix_cache_retention_interval,
        )

    @property
    def plain(self) -> bool:
        """One full-attention group: no head is ever skipped, and every full block is cached."""
        return len(self.groups) == 1 and self.groups[0].window is None

    def lookup_order(self) -> list[LookupGroup]:
        """Groups of one spec together, full attention first, as vLLM's coordinator asks them."""
        alike: list[tuple[Any, list[int]]] = []
        for number, group in enumerate(self.groups):
            for spec, numbers in alike:
                if spec == group.spec:
                    numbers.append(number)
                    break
            else:
                alike.append((group.spec, [number]))
        order = [LookupGroup(tuple(n), self.groups[n[0]].window is None) for _, n in alike]
        return sorted(order, key=lambda group: not group.nested)


def _window_of(
    spec: KVCacheSpec, max_in_flight_tokens: int, max_model_len: int
) -> HeadNeeds | None:
    kind = type(spec).__name__
    bounds = (max_in_flight_tokens, max_model_len)
    if kind == "SlidingWindowSpec" and not spec.extra_retained_tokens:
        return WindowNeeds(spec.block_size, spec.sliding_window, *bounds)
    if kind == "ChunkedLocalAttentionSpec" and not spec.attention_chunk_size % spec.block_size:
        return ChunkNeeds(spec.block_size, spec.attention_chunk_size, *bounds)
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        support.refuse("other-attention", kind, option="cache group of the model")
    return None
