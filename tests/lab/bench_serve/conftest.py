"""A stand-in for vLLM, a model folder without weights, a small dataset, and a series of them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

STAND_IN = Path(__file__).with_name("stand_in_vllm.py")
MARK = "TAGMA_TEST_SERIES"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and a tokenizer that counts words and signs; no weights."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "max_position_embeddings": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def conversation(number: int, turns: int) -> dict[str, Any]:
    said = [
        {"from": "human" if turn % 2 == 0 else "gpt", "value": f"words {number} {turn} " * 3}
        for turn in range(turns)
    ]
    return {"id": f"c{number}", "conversations": said}


@pytest.fixture(scope="session")
def dataset_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dataset") / "conversations.json"
    path.write_text(json.dumps([conversation(n, 2 + 2 * (n % 3)) for n in range(12)], indent=1))
    return path


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Lab(NamedTuple):
    """Runs ``tagma bench serve`` in a process of its own, on the stand-in."""

    output: Path
    journal: Path
    flags: list[str]

    def command(self, *more: str) -> list[str]:
        program = [sys.executable, "-c", "from vllm_tagma.cli import main; main()"]
        return [*program, "bench", "serve", "--output", str(self.output), *more]

    def environment(self, **behaviour: Any) -> dict[str, str]:
        chosen = {"journal": str(self.journal), **behaviour}
        mark = {MARK: str(self.output), "STAND_IN": json.dumps(chosen)}
        return {**os.environ, **mark}

    @contextmanager
    def start(self, *more: str, **behaviour: Any) -> Iterator[subprocess.Popen[str]]:
        """The running command, which is killed if the test fails while it runs."""
        process = subprocess.Popen(
            self.command(*self.flags, *more),
            env=self.environment(**behaviour),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                for left in self.left_behind():
                    left.kill()
            process.wait(timeout=10)

    def run(self, *more: str, **behaviour: Any) -> tuple[int, str]:
        """Exit status and everything printed."""
        with self.start(*more, **behaviour) as process:
            text, _ = process.communicate(timeout=120)
        return process.returncode, text

    def resume(self, **behaviour: Any) -> tuple[int, str]:
        """``--resume`` alone."""
        done = subprocess.run(
            self.command("--resume"),
            env=self.environment(**behaviour),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout

    def record(self, run: str) -> dict[str, Any]:
        return json.loads((self.output / "runs" / run / "run.json").read_text())

    def started(self) -> list[str]:
        """What the stand-in was started as, in order."""
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def left_behind(self) -> list[psutil.Process]:
        """Processes of this series that are still there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.output):
                    found.append(process)
        return found


@pytest.fixture
def lab(model: Path, dataset_file: Path, port: int, tmp_path: Path) -> Iterator[Lab]:
    flags = ["--profile", "cpu-smoke", "--model", str(model), "--dataset", str(dataset_file)]
    flags += ["--vllm-command", shlex.join([sys.executable, str(STAND_IN)]), "--port", str(port)]
    flags += ["--num-requests", "4", "--output-requests", "2", "--turns", "2", "--disk-bytes", "1"]
    flags += [
        "--workloads",
        "chat",
        "--system-tokens",
        "8",
        "--sample-interval",
        "0.05",
        "--kv-cache-memory-bytes",
        "1",
    ]
    made = Lab(tmp_path / "series", tmp_path / "journal", flags)
    yield made
    for process in made.left_behind():
        process.kill()


@pytest.fixture
def settings_of(model: Path, dataset_file: Path) -> Callable[..., Any]:
    """Settings of the smoke profile with changes."""
    from vllm_tagma.lab.bench_serve.profiles import PROFILES
    from vllm_tagma.lab.bench_serve.serve_settings import resolve

    def make(**changes: Any) -> Any:
        flags = {"profile": "cpu-smoke", "model": str(model), "dataset": str(dataset_file)}
        return resolve(flags={**flags, **changes}, config=None, profiles=PROFILES)

    return make
