"""Makes vLLM's schedulers on small pools, which the manager's tests build, importable here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

MANAGER = Path(__file__).parents[1] / "manager"
sys.path += [str(MANAGER), str(MANAGER / "differential")]


@pytest.fixture(scope="session")
def tagma_config(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A configuration for our backend, of a model that is never loaded."""
    from built_schedulers import engine_config

    return engine_config(tmp_path_factory.mktemp("llama"), "tagma")
