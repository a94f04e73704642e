"""CUDA graphs, natively: tables keep their addresses, so a captured step sees new rows."""

from __future__ import annotations

import pytest

from vllm_tagma.lab.kernel_check import kernel_checks


def check_a_replayed_graph_sees_new_rows(device: str) -> None:
    if device != "cuda":
        pytest.skip("graphs need a CUDA device")
    kernel_checks.check_graph(device=device)
