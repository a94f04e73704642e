"""An attention backend of vLLM that reads range tables: ``--attention-backend CUSTOM``.

Registered by vLLM's own registry (``backend_registration.py``). It is vLLM's Triton backend with
other metadata and another kernel: cache layouts, cache writes and limits are inherited. The
metadata names the range tables of Model Runner V2 and the batch's rows in them, both at addresses
that never change, so that captured graphs see the rows of each step; no block table is expanded.

Seam 1, ``TritonAttentionBackend`` and its metadata builder and implementation: subclassed. It can
go when vLLM lets a backend name the table that its kernel reads.
Seam 2, ``GPUModelRunner.attn_groups``: holds the builders, which are made before the block tables
are; the runner gives them the rows right after (``attach``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_tagma import attention_backend
from vllm_tagma.errors import InvariantError, UnsupportedError
from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.kernels.range_attention import Pieces, range_attention
from vllm_tagma.worker.self_test import Check
from vllm_tagma.worker.self_test_attention import AttentionLayer, attention_checks

_OFFER = "--attention-backend TRITON_ATTN, or none"


@dataclass(frozen=True)
class BatchRows:
    """The rows that a cache group's attention reads.

    ``rows``: int64 [requests], the batch's rows in ``tables``, -1 for none; rewritten in each step,
    at one address.
    """

    tables: DeviceRangeTables
    rows: torch.Tensor
    group: int
    block_size: int


@dataclass
class RangeAttentionMetadata(AttentionMetadata):  # type: ignore[misc]
    """One step of one cache group. ``idx_mapping``: a view of ``batch.rows``."""

    batch: BatchRows
    idx_mapping: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    pieces: Pieces | None


class RangeAttentionMetadataBuilder(TritonAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds metadata from the batch's rows; ``batch`` is set by ``attach``."""

    batch: BatchRows | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> RangeAttentionMetadata:
        """Metadata of a step. Raises ``UnsupportedError`` for what the kernel does not compute."""
        common = common_attn_metadata
        if self.batch is None:
            raise UnsupportedError(
                f"--attention-backend {attention_backend.NAME} reads the range tables of "
                f"--kv-cache-backend tagma, and this engine has none. Add it, or use {_OFFER}."
            )
        if common.causal is not True or common.mm_req_doc_ranges is not None:
            raise UnsupportedError(
                f"--attention-backend {attention_backend.NAME} is causal only; this batch is not. "
                f"Use {_OFFER}."
            )
        few = common.num_reqs <= self.seq_threshold_3D
        return RangeAttentionMetadata(
            batch=self.batch,
            idx_mapping=self.batch.rows[: common.num_reqs],
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            pieces=Pieces(self.softmax_segm_output, self.softmax_segm_max, self.softmax_segm_expsum)
            if few
            else None,
        )


class RangeAttentionImpl(TritonAttentionImpl):  # type: ignore[misc]
    """Attention of a layer over ranges; writes to the cache are vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = {
            f"attention of the kind {self.attn_type}": self.attn_type != AttentionType.DECODER,
            "ALiBi": self.alibi_slopes is not None,
            f"a KV cache of the type {self.kv_cache_dtype}": self.kv_cache_dtype
            not in RangeAttentionBackend.supported_kv_cache_dtypes,
            "block-local attention": self.chunk_lookback > -1,
            "layers that share another's KV cache": self.kv_sharing_target_layer_name is not None,
        }
        for name, is_found in found.items():
            if is_found:
                raise UnsupportedError(
                    f"--attention-backend {attention_backend.NAME} does not serve {name}, which "
                    f"this model has. Use {_OFFER}."
                )
        self.window = self.sliding_window[0] + 1 if self.sliding_window[0] >= 0 else 0

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's: ``output`` [tokens, heads, head size] is written and returned."""
        if attn_metadata is None:  # memory is being profiled
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                f"--attention-backend {attention_backend.NAME} does not quantise its output. "
                f"Use {_OFFER}."
            )
        batch, tokens = attn_metadata.batch, attn_metadata.num_actual_tokens
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if keys.shape[1] != batch.block_size:
            raise InvariantError(
                f"the cache has blocks of {keys.shape[1]} tokens and the rows of cache group "
                f"{batch.group} count blocks of {batch.block_size}"
            )
        range_attention(
            batch.tables,
            attn_metadata.idx_mapping,
            query[:tokens],
            keys,
            values,
            group=batch.group,
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            max_query_len=attn_metadata.max_query_len,
            scale=self.scale,
            out=output[:tokens],
            window=self.window,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            pieces=attn_metadata.pieces,
        )
        return output


class RangeAttentionBackend(TritonAttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it takes the backend: Triton's answers, less what is not covered."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return attention_backend.NAME

    @staticmethod
    def get_impl_cls() -> type[RangeAttentionImpl]:
        return RangeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RangeAttentionMetadataBuilder]:
        return RangeAttentionMetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


def attach(runner: Any) -> None:
    """Gives a V2 runner's builders of this backend their rows, once its block tables exist.

    Those groups' block tables are no longer expanded. Raises ``UnsupportedError`` if the backend
    was asked for and vLLM took another one for some layers, which would read tables of zeros.
    """
    asked = attention_backend.chosen(runner.vllm_config)
    tables = runner.block_tables
    for number, groups in enumerate(runner.attn_groups):
        ours = [g for g in groups if issubclass(g.backend, RangeAttentionBackend)]
        others = sorted({g.backend.get_name() for g in groups if g not in ours})
        if others and (asked or ours):
            raise UnsupportedError(
                f"--attention-backend {attention_backend.NAME} was given, and vLLM took "
                f"{', '.join(others)} for layers of cache group {number}, which read block tables. "
                f"Use {_OFFER}."
            )
        for group in ours:
            batch = BatchRows(
                tables=tables.ranges.tables,
                rows=tables.read_by_range(number),
                group=number,
                block_size=tables.block_sizes[number],
            )
            for builder in group.metadata_builders:
                builder.batch = batch


def start_checks(runner: Any) -> tuple[Check, ...]:
    """What the start-up self-test adds for this backend: a layer of each of its cache groups."""
    layers = runner.vllm_config.compilation_config.static_forward_context
    checks: tuple[Check, ...] = ()
    for number, groups in enumerate(runner.attn_groups):
        for group in groups:
            if not issubclass(group.backend, RangeAttentionBackend):
                continue
            layer = layers[group.layer_names[0]]
            impl = layer.impl
            checks += attention_checks(
                AttentionLayer(
                    group=number,
                    heads=impl.num_heads,
                    cache=layer.kv_cache,
                    query_dtype=runner.vllm_config.model_config.dtype,
                    scale=impl.scale,
                    window=impl.window,
                    soft_cap=impl.logits_soft_cap,
                    sinks=impl.sinks,
                )
            )
    return checks
