"""How vLLM's own tests are unpacked, with a stand-in for pip that hands out a small archive."""

from __future__ import annotations

import json
import sys

import pytest

import environment
import vllm_tests
from progress import SetupFailure

# Writes what it was asked, with the two variables that decide whether pip gets through.
STAND_IN = """#!{python}
import io, json, os, sys, tarfile
here = os.path.dirname(os.path.abspath(__file__))
words = sys.argv[1:]
asked = [os.environ.get(name) for name in ("VLLM_VERSION_OVERRIDE", "VLLM_TARGET_DEVICE")]
with open(os.path.join(here, "calls"), "a") as calls:
    calls.write(json.dumps([words, asked]) + "\\n")
if "download" in words:
    folder = words[words.index("--dest") + 1]
    os.makedirs(folder)
    with tarfile.open(os.path.join(folder, "vllm-0.32.0.tar.gz"), "w:gz") as archive:
        for name in {names!r}:
            member = tarfile.TarInfo("vllm-0.32.0/" + name)
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
"""
NAMES = ["tests/v1/core/test_a.py", "tests/a.mp4", "setup.py", "tests/../../evil.py"]


@pytest.fixture
def built(tmp_path, progress):
    made = environment.Environment(root=tmp_path, progress=progress, cuda=False)
    made.python.parent.mkdir(parents=True)
    made.python.write_text(STAND_IN.format(python=sys.executable, names=NAMES))
    made.python.chmod(0o755)

    def calls():
        lines = (made.python.parent / "calls").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return made, calls


def test_only_the_text_files_of_the_tests_are_unpacked(built, tmp_path):
    made, _ = built
    folder = vllm_tests.provide(made)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {"complete", "tests/v1/core/test_a.py"}
    assert not list(tmp_path.rglob("evil.py"))


def test_pip_is_told_the_version_that_the_build_script_shall_name(built):
    made, calls = built
    vllm_tests.provide(made)
    (packages, alone), (download, told) = calls()
    assert packages[2] == "install"
    assert "--no-deps" in packages
    assert alone == [None, None]
    assert download[-1] == f"vllm=={vllm_tests.VERSION}"
    assert "--no-build-isolation" in download
    assert told == [vllm_tests.VERSION, "empty"]


def test_what_is_there_is_not_asked_for_again(built, tmp_path, monkeypatch):
    made, calls = built
    vllm_tests.provide(made)
    vllm_tests.provide(made)
    assert len(calls()) == 2
    monkeypatch.setattr(vllm_tests, "PACKAGES", ("tblib>=4",))
    assert not vllm_tests.is_ready(tmp_path)


def test_a_failed_download_leaves_nothing_ready(built, tmp_path):
    made, _ = built
    made.python.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SetupFailure):
        vllm_tests.provide(made)
    assert not vllm_tests.is_ready(tmp_path)
