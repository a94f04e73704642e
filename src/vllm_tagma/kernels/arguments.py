"""What the launchers check before a kernel reads or writes device memory: types, shapes, devices.

Only metadata is looked at; nothing here waits for a device. A wrong stride or dtype would not fail
in a kernel, it would write KV to the wrong place. The tables were checked when they were made. This
runs in every step, so text is made only for an error.
"""

from __future__ import annotations

import torch

from vllm_tagma.kernels.device_range_tables import DeviceRangeTables

_INDEX = (torch.int32, torch.int64)
_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_BOOL = (torch.bool,)


def _require(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: str,
    fits: bool,
    device: torch.device,
) -> None:
    if fits and tensor.dtype in dtypes and tensor.device == device and tensor.stride(-1) == 1:
        return
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be {wanted}, not {str(tensor.dtype).removeprefix('torch.')}")
    if not fits:
        raise ValueError(f"{name} must have shape {shape}, not {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the range tables are on {device}")
    if tensor.numel() > 1:  # a single element has any stride
        raise ValueError(f"{name} must have stride 1 in its last dimension")


def check_batch(
    tables: DeviceRangeTables,
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_sizes: torch.Tensor,
    enabled: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Raises ``ValueError`` unless the arguments of a slot mapping fit ``tables``."""
    groups, device = tables.num_blocks.shape[0], tables.num_blocks.device
    fits = idx_mapping.dim() == 1
    _require("idx_mapping", idx_mapping, _INDEX, "[requests]", fits, device)
    fits = query_start_loc.dim() == 1 and query_start_loc.shape[0] > idx_mapping.shape[0]
    _require("query_start_loc", query_start_loc, _INT32, "[> requests]", fits, device)
    _require("positions", positions, _INT64, "[tokens]", positions.dim() == 1, device)
    fits = block_sizes.shape == (groups,)
    _require("block_sizes", block_sizes, _INT32, "[groups]", fits, device)
    _require("enabled", enabled, _BOOL, "[groups]", enabled.shape == (groups,), device)
    fits = out.dim() == 2 and out.shape[0] == groups
    _require("out", out, _INT64, "[groups, width]", fits, device)


def check_expansion(
    tables: DeviceRangeTables,
    *,
    idx_mapping: torch.Tensor,
    group: int,
    num_rows: int,
    out: torch.Tensor,
    num_computed_tokens: torch.Tensor | None,
    reach: int,
) -> None:
    """Raises ``ValueError`` unless the arguments of an expansion fit ``tables``."""
    (groups, rows), device = tables.num_blocks.shape, tables.num_blocks.device
    if not 0 <= group < groups:
        raise ValueError(f"group {group} is outside 0..{groups - 1}")
    fits = idx_mapping.dim() == 1 and idx_mapping.shape[0] <= num_rows
    _require("idx_mapping", idx_mapping, _INDEX, "[<= num_rows]", fits, device)
    fits = out.dim() == 2 and out.shape[0] >= num_rows
    _require("out", out, _INT32, "[>= num_rows, width]", fits, device)
    if reach > 0:
        if num_computed_tokens is None:
            raise ValueError("sliding_window_reach needs num_computed_tokens")
        fits = num_computed_tokens.shape == (rows,)
        _require("num_computed_tokens", num_computed_tokens, _INT32, "[rows]", fits, device)
