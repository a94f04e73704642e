"""Runs the folder ``cases`` in a process per device and vLLM release.

The Triton interpreter is chosen by environment before the kernels are defined, and vLLM needs a
stand-in backend to use it, which would change every other test of this process. On a machine with
CUDA the same cases also run natively.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_tagma import versions

HERE = Path(__file__).parent
TESTS = HERE.parent
REPOSITORY = TESTS.parent

DEVICES = [
    "interpreter",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ),
]


def run_cases(*names: str, device: str, packages: tuple[Path, ...] = ()) -> str:
    """The output of pytest over files of ``cases``; fails this test if any case failed."""
    environment = dict(os.environ)
    path = [*packages, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if device == "interpreter":
        path.insert(0, TESTS / "triton_interpreter")
        environment.update(TRITON_INTERPRET="1", TAGMA_KERNEL_DEVICE="cpu", OMP_NUM_THREADS="1")
    else:
        environment.update(TAGMA_KERNEL_DEVICE="cuda")
        environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(str(p) for p in path if str(p))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=check_*.py", "-o", "python_functions=check_*"]
    command += ["-W", "ignore", *(str(HERE / "cases" / f"check_{name}.py") for name in names)]
    run = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    return run.stdout


def _sources_033() -> Path:
    folder = Path(os.environ.get("TAGMA_VLLM033", REPOSITORY / "build" / "vllm-0.33"))
    assert (folder / "vllm").is_dir(), f"{folder} is missing: run `make test`"
    return folder


def _cpu_alias(folder: Path) -> Path:
    """Metadata that says "cpu": the unpacked sources are those of the CUDA build."""
    metadata = folder / "vllm-0.33.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
    return folder


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_equal_their_reference(device: str) -> None:
    """And load no more than they claim."""
    run_cases("reference", "staged_range_tables", "block_moves", "loads", "graph", device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_self_test_names_what_is_broken(device: str) -> None:
    run_cases("self_test", device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_attention_over_ranges_equals_vllms(device: str) -> None:
    run_cases("range_attention", "range_backend", device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_block_tables_equal_vllms(device: str) -> None:
    skips = "skipped" in run_cases("block_tables", device=device)
    assert skips == (versions.require_supported_vllm() == "0.32"), "0.33 masks sliding windows"


def test_block_tables_equal_those_of_vllm_033(tmp_path: Path) -> None:
    """Its Python files over the installed CPU build; under the interpreter they need no more."""
    packages = (_cpu_alias(tmp_path), _sources_033())
    output = run_cases("block_tables", device="interpreter", packages=packages)
    assert "skipped" not in output


@pytest.mark.parametrize("release", ["installed", "0.33"])
def test_rows_are_as_the_scheduler_knows_them(release: str, tmp_path: Path) -> None:
    packages = (_cpu_alias(tmp_path), _sources_033()) if release == "0.33" else ()
    run_cases("scheduler_rows", device="interpreter", packages=packages)


@pytest.mark.parametrize("release", ["installed", "0.33"])
def test_who_reads_the_rows_of_block_ids(release: str) -> None:
    """The ids are not written by default, so a new reader of them in vLLM must fail here."""
    root = _sources_033() / "vllm" if release == "0.33" else versions.vllm_root()
    assert root is not None
    own = {"v1/worker/gpu/block_table.py"}
    pattern = re.compile(r"\bblock_tables\.(block_tables|block_table_ptrs|block_table_strides)\b")
    readers = {
        path.relative_to(root).as_posix()
        for path in (root / "v1").rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert readers - own == {"v1/worker/gpu/model_states/mamba_hybrid.py"}
