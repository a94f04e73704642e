"""The environment as recorded, and pinning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tagma.lab.bench import environment


def test_what_is_recorded() -> None:
    captured = environment.capture()
    json.dumps(captured)
    assert captured["machine"]["cpu"]
    assert captured["machine"]["cpus_online"] == os.cpu_count()
    assert captured["system"]["release"] == os.uname().release
    assert captured["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    for name in ("vllm", "torch", "numpy", "vllm_tagma"):
        assert captured["versions"][name]
    assert set(captured["machine"]) >= {"governor", "turbo", "hypervisor", "load_average"}
    assert captured["pinning"]["cpus"] == environment.pinned_cpus()


def test_a_foreign_repository_lends_no_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "--quiet")
    (tmp_path / "file").write_text("text")
    git("add", "file")
    git("commit", "--quiet", "-m", "first")
    source = environment.capture(root=tmp_path)["source"]
    assert (source["commit"], source["modified"], source["core_commit"]) == (None, None, None)


def test_pinning_takes_one_cpu_and_refuses_others() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert environment.pin(None) == [max(before)]
        assert os.sched_getaffinity(0) == {max(before)}
        with pytest.raises(ValueError, match="--cpu 4711 is not available"):
            environment.pin(4711)
    finally:
        os.sched_setaffinity(0, before)
