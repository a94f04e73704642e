"""The self-test of attention over ranges, where it was chosen: a layer of each cache group.

Random keys and values in a small cache with the memory layout of the layer's own; rows of one range
and of several, a decode in pieces, a prefill, a request without a row, and on CUDA the decode in a
replayed graph. Compared with the definition in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from vllm_tagma._native import BlockRanges
from vllm_tagma.kernels.range_attention import Pieces, range_attention
from vllm_tagma.worker.self_test import Check, Difference, Subject
from vllm_tagma.worker.staged_range_tables import RowEnd, StagedRangeTables

_ROWS: Final = ([5, 6, 7], [17, 18, 9, 11, 12, 2], [1])
_BLOCKS: Final = 19
_QUERIES: Final = (9, 1, 3)  # of a prefill's requests
_PIECES: Final = 4
_NEAR: Final = 2e-2
"""Of values around 1: fp16 and bf16 round them by 2^-9, and TF32 rounds products of fp32."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """What a layer asks of the kernel. ``cache``: [blocks, KV heads, block size, 2 * head size], of
    which shape, strides and type are taken."""

    group: int
    heads: int
    cache: torch.Tensor
    query_dtype: torch.dtype
    scale: float
    window: int
    soft_cap: float
    sinks: torch.Tensor | None


def attention_checks(layer: AttentionLayer) -> tuple[Check, ...]:
    """The checks of one layer, to be added to a runner's."""
    name = f"attention over ranges, group {layer.group}"
    checks: tuple[Check, ...] = (
        Check(f"{name}, decode (Triton)", lambda subject: _Step(subject, layer, (1, 1, 1)).check()),
        Check(f"{name}, prefill (Triton)", lambda subject: _Step(subject, layer, _QUERIES).check()),
    )
    if layer.cache.is_cuda:
        checks += (Check(f"{name}, decode in a CUDA graph", _replayed(layer)),)
    return checks


def _replayed(layer: AttentionLayer) -> Callable[[Subject], None]:
    def run(subject: Subject) -> None:
        step = _Step(subject, layer, (1, 1, 1))
        step.launch()  # compiles outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.launch()
        step.out.fill_(math.nan)
        graph.replay()
        step.compare()

    return run


class _Step:
    """A batch of the rows above, each with its last queries, and one request without a row."""

    def __init__(self, subject: Subject, layer: AttentionLayer, queries: tuple[int, ...]) -> None:
        device, cache = subject.device, layer.cache
        _, kv_heads, block_size, width = cache.shape
        self.layer, self.queries, self.head_size = layer, queries, width // 2
        order = sorted(range(4), key=lambda axis: cache.stride(axis), reverse=True)
        shape = (_BLOCKS, kv_heads, block_size, width)
        generator = torch.Generator(device).manual_seed(7)

        def drawn(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device)

        memory = drawn(*(shape[axis] for axis in order)).to(cache.dtype)
        logical = memory.permute(*(order.index(axis) for axis in range(4))).transpose(1, 2)
        self.keys, self.values = logical.split(self.head_size, dim=-1)

        tables = StagedRangeTables(groups=len(subject.groups), rows=len(_ROWS), device=device)
        for row, ids in enumerate(_ROWS):
            # Other groups have other rows, which a wrong group or row -1 would read.
            own = {group: ids if group == layer.group else [row + 3] for group in subject.groups}
            tables.write(row, [RowEnd(g, 0, BlockRanges.from_ids(own[g])) for g in own])
        tables.apply_staged_writes()
        self.tables = tables.tables
        self.lengths = [len(ids) * block_size - 2 for ids in _ROWS]
        starts = [0]
        for count in (*queries, 1):
            starts.append(starts[-1] + count)
        self.starts = starts
        on_device = {"dtype": torch.int32, "device": device}
        self.loc = torch.tensor(starts, **on_device)
        self.seq_lens = torch.tensor([*self.lengths, 1], **on_device)
        self.index = torch.tensor([0, 1, 2, -1], dtype=torch.int64, device=device)
        self.query = drawn(starts[-1], layer.heads, self.head_size).to(layer.query_dtype)
        self.out = torch.full_like(self.query, math.nan)
        width = 1 << (self.head_size - 1).bit_length()
        acc = torch.empty((starts[-1], layer.heads, _PIECES, width), device=device)
        self.pieces = Pieces(acc, acc[..., 0].contiguous(), acc[..., 0].contiguous())

    def launch(self) -> None:
        range_attention(
            self.tables,
            self.index,
            self.query,
            self.keys,
            self.values,
            group=self.layer.group,
            query_start_loc=self.loc,
            seq_lens=self.seq_lens,
            max_query_len=max(self.queries),
            scale=self.layer.scale,
            out=self.out,
            window=self.layer.window,
            soft_cap=self.layer.soft_cap,
            sinks=self.layer.sinks,
            pieces=self.pieces,
        )

    def check(self) -> None:
        self.launch()
        self.compare()

    def compare(self) -> None:
        """Raises ``Difference`` naming the request and how far its output is off."""
        for request, ids in enumerate(_ROWS):
            mine = self.out[self.starts[request] : self.starts[request + 1]].float()
            off = (mine - self._definition(request, ids)).abs().max()
            if not off <= _NEAR:  # NaN is not near
                raise Difference(
                    f"request {request} of {len(ids)} blocks, {self.queries[request]} queries: "
                    f"off by {float(off):.3g}, where {_NEAR} is rounding"
                )
        if self.out[self.starts[-2] :].any():
            raise Difference("a request without a row was given an output")

    def _definition(self, request: int, ids: list[int]) -> torch.Tensor:
        layer, length, count = self.layer, self.lengths[request], self.queries[request]
        group = layer.heads // self.keys.shape[2]
        keys, values = (
            cache[ids].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
            for cache in (self.keys, self.values)
        )
        query = self.query[self.starts[request] : self.starts[request + 1]].float()
        score = torch.einsum("qhd,khd->hqk", query, keys) * layer.scale
        if layer.soft_cap:
            score = layer.soft_cap * torch.tanh(score / layer.soft_cap)
        key = torch.arange(length, device=query.device)
        back = key[length - count :, None] - key[None]
        hidden = (back < 0) | ((back >= layer.window) if layer.window else (back < 0))
        score = score.masked_fill(hidden, -math.inf)
        if layer.sinks is not None:
            sink = layer.sinks.float()[:, None, None].expand(-1, count, 1)
            score = torch.cat([score, sink], dim=2)
        return torch.einsum("hqk,khd->qhd", score.softmax(dim=2)[..., :length], values)
