"""A result knows which core it measured, and a report says when the tree's is another."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_tagma.lab.bench import core_source, environment

ROOT = Path(__file__).resolve().parents[3]


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The core's sources and a file of the Python side in a repository of their own."""
    for name in ("csrc/tagma", "csrc/bindings"):
        shutil.copytree(ROOT / name, tmp_path / name)
    package = tmp_path / "src" / "vllm_tagma"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src/vllm_tagma/manager.py", package)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def measured(copy: Path) -> dict[str, object]:
    commit = git(copy, "rev-parse", "HEAD")
    return {"commit": commit, "core_commit": commit, "core": core_source.of_tree(copy)}


def test_the_compiled_core_is_this_trees() -> None:
    """CMake and Python reckon the same; it fails too where the module was not built anew."""
    assert core_source.compiled() == core_source.of_tree(ROOT)
    assert environment.capture()["source"]["core"] == core_source.compiled()


def test_a_result_of_this_code_has_no_difference(copy: Path) -> None:
    assert core_source.differences(measured(copy), root=copy) == []


@pytest.mark.parametrize("name", ["csrc/tagma/kv_pool.hpp", "csrc/bindings/pool.cpp"])
def test_a_changed_core_is_said(copy: Path, name: str) -> None:
    source = measured(copy)
    with (copy / name).open("a") as file:
        file.write("// changed\n")
    (difference,) = core_source.differences(source, root=copy)
    commit = str(source["commit"])[:12]
    assert difference == (
        f"The core that was measured (commit {commit}) is not this tree's: measure again."
    )
    # Results of before the digest have the commit alone.
    (difference,) = core_source.differences({**source, "core": None}, root=copy)
    assert difference.startswith("The core has changed since it was measured")


def test_a_changed_python_side_is_said(copy: Path) -> None:
    source = measured(copy)
    (copy / "src/vllm_tagma/manager.py").write_text("changed = True\n")
    git(copy, "commit", "--quiet", "-a", "-m", "second")
    (difference,) = core_source.differences(source, root=copy)
    assert difference.startswith("The Python side has changed since it was measured")


def test_a_result_that_names_nothing_is_said(copy: Path) -> None:
    for source in ({}, {"commit": None}, {"commit": "0" * 40}):
        found = core_source.differences(source, root=copy)
        assert found[0].startswith("Which core was measured is not known"), source


def test_a_file_more_is_another_core(copy: Path) -> None:
    before = core_source.of_tree(copy)
    (copy / "csrc/tagma/more.hpp").write_text("")
    assert core_source.of_tree(copy) != before
    assert core_source.of_tree(copy / "src") is None
