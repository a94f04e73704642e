"""The seams of attention over ranges. How to read an entry: ``seam.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_tagma.integration.seams.seam import Seam

_BACKEND = "vllm.v1.attention.backend"
_TRITON = "vllm.v1.attention.backends.triton_attn"
_REGISTRY = "vllm.v1.attention.backends.registry"
_NAMES_ITS_TABLE = "vLLM lets an attention backend name the table that its kernel reads"

_SUBCLASSED: Final[Mapping[str, str]] = {
    f"{_TRITON}:TritonAttentionMetadataBuilder.__init__": (
        "(self, kv_cache_spec, layer_names, vllm_config, device)"
    ),
    f"{_TRITON}:TritonAttentionMetadataBuilder.build": (
        "(self, common_prefix_len, common_attn_metadata, fast_build=False) "
        "-> TritonAttentionMetadata"
    ),
    f"{_TRITON}:TritonAttentionMetadataBuilder.build_for_cudagraph_capture": (
        "(self, common_attn_metadata) -> TritonAttentionMetadata"
    ),
    f"{_TRITON}:TritonAttentionImpl.__init__": (
        "(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, "
        "kv_cache_dtype, logits_soft_cap=None, attn_type=AttentionType.DECODER, "
        "kv_sharing_target_layer_name=None, sinks=None, use_alibi_sqrt=False, chunk_lookback=-1) "
        "-> None"
    ),
    f"{_TRITON}:TritonAttentionImpl.forward": (
        "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, "
        "output_block_scale=None) -> torch.Tensor"
    ),
    f"{_TRITON}:TritonAttentionImpl.do_kv_cache_update": (
        "(self, layer, key, value, kv_cache, slot_mapping)"
    ),
    f"{_TRITON}:TritonAttentionBackend.get_name": "@staticmethod () -> str",
    f"{_TRITON}:TritonAttentionBackend.get_impl_cls": (
        "@staticmethod () -> type['TritonAttentionImpl']"
    ),
    f"{_TRITON}:TritonAttentionBackend.get_builder_cls": (
        "@staticmethod () -> type['TritonAttentionMetadataBuilder']"
    ),
    f"{_TRITON}:TritonAttentionBackend.supports_attn_type": "@classmethod (cls, attn_type) -> bool",
    **{
        f"{_TRITON}:TritonAttentionBackend.{name}": "@classmethod (cls) -> bool"
        for name in (
            "supports_non_causal",
            "supports_mm_prefix",
            "supports_rswa",
            "supports_alibi_sqrt",
            "supports_batch_invariance",
        )
    },
    f"{_BACKEND}:AttentionBackend.supports_kv_connector": "@classmethod (cls) -> bool",
}

_READ: Final[Mapping[str, str]] = {
    f"{_BACKEND}:CommonAttentionMetadata.{name}": expected
    for name, expected in {
        "query_start_loc": "torch.Tensor",
        "seq_lens": "torch.Tensor",
        "num_reqs": "int",
        "num_actual_tokens": "int",
        "max_query_len": "int",
        "slot_mapping": "torch.Tensor",
        "causal": "bool | torch.Tensor = True",
        "mm_req_doc_ranges": "dict[int, list[tuple[int, int]]] | None = None",
    }.items()
}

ATTENTION_SEAMS: Final[tuple[Seam, ...]] = (
    Seam(
        target=f"{_REGISTRY}:register_backend",
        kind="contract",
        room="worker_v2",
        why="--attention-backend CUSTOM becomes ours by it (backend_registration.py)",
        expected="(backend, class_path=None, is_mamba=False) -> Callable[[type], type]",
        remove_when="never: vLLM made it for backends from outside",
    ),
    *(
        Seam(
            target=f"{_REGISTRY}:AttentionBackendEnum.{name}",
            kind="contract",
            room="worker_v2",
            why="tells whether another plugin has taken CUSTOM (attention_backend.py)",
            expected=expected,
            remove_when="never: vLLM made it for backends from outside",
        )
        for name, expected in (
            ("get_path", "(self, include_classname=True) -> str"),
            ("is_overridden", "(self) -> bool"),
        )
    ),
    *(
        Seam(
            target=target,
            kind="subclass",
            room="worker_v2",
            why="RangeAttentionBackend, its builder and layers extend it (range_backend.py)",
            expected=expected,
            remove_when=_NAMES_ITS_TABLE,
        )
        for target, expected in _SUBCLASSED.items()
    ),
    *(
        Seam(
            target=target,
            kind="contract",
            room="worker_v2",
            why="what a step says of its batch (range_backend.py)",
            expected=expected,
            remove_when=_NAMES_ITS_TABLE,
        )
        for target, expected in _READ.items()
    ),
    Seam(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        callee="init_attn_backend",
        kind="contract",
        room="worker_v2",
        why="makes the builders that are given their rows right after (range_backend.py)",
        expected="(*3, draft_layer_names=)",
        remove_when=_NAMES_ITS_TABLE,
    ),
    Seam(
        target="vllm.v1.worker.utils:AttentionGroup.metadata_builders",
        kind="contract",
        room="worker_v2",
        why="holds the builders of a group of layers (range_backend.py)",
        expected="list[AttentionMetadataBuilder] = field(default_factory=lambda: [])",
        remove_when=_NAMES_ITS_TABLE,
    ),
)
