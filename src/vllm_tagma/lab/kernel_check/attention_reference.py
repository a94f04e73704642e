"""Attention as it is defined, in fp32: what the kernels over ranges and over tables must equal."""

from __future__ import annotations

import math

import torch


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one request; fp32 [queries, heads, head size].

    ``query``: [queries, heads, head size], the last of the request's tokens. ``keys``, ``values``:
    [tokens, KV heads, head size]. The rest as ``range_attention``. O(queries * tokens) memory.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (keys, values))
    score = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if soft_cap:
        score = soft_cap * torch.tanh(score / soft_cap)
    first = keys.shape[0] - query.shape[0]
    place = torch.arange(first, keys.shape[0], device=query.device)[:, None]
    key = torch.arange(keys.shape[0], device=query.device)[None]
    sees = key <= place
    if window:
        sees &= place - key < window
    score = score.masked_fill(~sees, -math.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, query.shape[0], 1)
        score = torch.cat([score, sink], dim=2)
    weight = score.softmax(dim=2)[..., : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weight, values)
