"""Every command of every profile, read by the parsers of the vLLM that is installed."""

from __future__ import annotations

import json
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_tagma.lab.bench.bench_command import app
from vllm_tagma.lab.bench_serve.commands import SCOPES
from vllm_tagma.lab.bench_serve.profiles import PROFILES, SMOKE_DATASET


@pytest.fixture(scope="module")
def parse():
    """vLLM's command line: `vllm serve` and `vllm bench serve`, without running either."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import vllm_tagma  # noqa: F401  - adds --kv-cache-backend

    server = FlexibleArgumentParser(prog="vllm")
    commands = server.add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(commands)
    client = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(client)

    def read(words: list[str]) -> Namespace:
        if words[1] == "serve":
            found = server.parse_args(words[1:])
            (command,) = (c for c in cmd_init() if c.name == "serve")
            command.validate(found)
            return found
        assert words[1:3] == ["bench", "serve"]
        return client.parse_args(words[3:])

    return read


def dry_run(*flags: str) -> list[list[str]]:
    done = CliRunner().invoke(app, ["serve", "--dry-run", *flags])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("profile", PROFILES)
def test_vllm_accepts_every_command(parse, profile: str) -> None:
    commands = dry_run(
        *(
            "--profile",
            profile,
            "--profile-kernels",
            "--request-rate",
            "2.5",
            "--dataset",
            "d.json",
        ),
        *("--server-args", "--max-num-seqs 7", "--tagma-args", "--max-num-batched-tokens 4096"),
    )
    servers = [(words, parse(words)) for words in commands if words[1] == "serve"]
    clients = [(words, parse(words)) for words in commands if words[1] == "bench"]
    preset = PROFILES[profile]
    loads = len(preset["concurrency"]) + 1
    repeats = preset.get("repeats", 2)
    assert len(servers) == 2 * repeats + 2
    assert len(clients) == 2 * repeats * (1 + 2 * loads) + 2
    for words, found in servers:
        backend = words[words.index("--kv-cache-backend") + 1]
        config = found.additional_config or {}
        assert config["kv_cache_backend"] == backend
        assert "tagma" not in config, "a GPU is admitted without options"
        assert found.max_model_len == preset["max_model_len"]
        assert found.max_num_seqs == 7
        assert (found.max_num_batched_tokens == 4096) == (backend == "tagma")
    for _, found in clients:
        assert found.dataset_name == "custom"
        assert found.temperature == 0
        assert found.custom_output_len == -1
        assert found.save_detailed
        assert found.disable_shuffle
    recorded = [found for words, found in servers if "--profiler-config" in words]
    assert len(recorded) == 2
    for found in recorded:
        assert found.profiler_config.profiler == "torch"
        assert found.profiler_config.max_iterations > 0
        assert found.worker_extension_cls == SCOPES
    assert sum(found.profile for _, found in clients) == 2


def test_a_dry_run_says_what_is_missing_and_starts_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["serve", "--dry-run", "--profile", "gpu-128k", "--output", str(tmp_path / "out")]
    )
    assert done.exit_code == 0
    assert "# would stop: dataset: none given" in done.output
    assert "# would stop: model: meta-llama/Llama-3.1-8B-Instruct is neither" in done.output
    assert "hf download meta-llama/Llama-3.1-8B-Instruct" in done.output
    assert "(an estimate)" in done.output
    assert "--max-model-len 131072" in done.output
    assert not (tmp_path / "out").exists()


def test_make_has_a_target_for_it(pytestconfig: pytest.Config) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "bench-smoke", "OUT=a b", "ARGS=--seed 3"],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=True,
    )
    last = shlex.split(done.stdout.splitlines()[-1])
    assert last[1:] == [
        *("bench", "serve", "--profile", "cpu-smoke", "--output", "a b", "--seed", "3"),
    ]


def test_users_flags_come_last(settings_of) -> None:
    from vllm_tagma.lab.bench_serve.commands import server_command
    from vllm_tagma.lab.bench_serve.serve_plan import runs_of

    settings = settings_of(server_args="--dtype bfloat16", tagma_args="--seed 9")
    paged, tagma = (
        server_command(settings, run=run, traces=Path("t")) for run in runs_of(settings)[:2]
    )
    assert paged[-2:] == ["--dtype", "bfloat16"]
    assert tagma[-4:] == ["--dtype", "bfloat16", "--seed", "9"]


def test_vllms_client_takes_the_file(settings_of, tmp_path: Path) -> None:
    """Its own loader, with the flags of commands.py: nothing dropped, nothing reordered."""
    from vllm.benchmarks.datasets import CustomDataset

    from vllm_tagma.lab.bench_serve import dataset, workload
    from vllm_tagma.lab.bench_serve.serve_plan import stages_of

    settings = settings_of(num_requests=6)
    conversations = dataset.read(SMOKE_DATASET).conversations
    builder = workload.Builder(settings, conversations, count=lambda text: len(text.split()))
    requests = builder.stage(stages_of(settings)[1])
    workload.write(requests, tmp_path / "chat.jsonl")
    samples = CustomDataset(dataset_path=str(tmp_path / "chat.jsonl"), disable_shuffle=True).sample(
        tokenizer=lambda text: SimpleNamespace(input_ids=text.split()),
        num_requests=6,
        output_len=-1,
        skip_chat_template=True,
        no_oversample=True,
    )
    assert [s.prompt for s in samples] == [r.prompt for r in requests]
    assert [s.expected_output_len for s in samples] == [r.output_tokens for r in requests]
    assert json.loads((tmp_path / "chat.jsonl").read_text().splitlines()[0])["prompt"]


def test_the_profilers_scopes_wrap_both_calls() -> None:
    """In this process, which never runs a model."""
    from torch.profiler import ProfilerActivity, profile
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    from vllm_tagma.lab.bench_serve import scopes, serve_kernels

    assert scopes.WorkerScopes.__qualname__ == SCOPES.rpartition(".")[2]
    tables = MultiGroupBlockTable.__new__(MultiGroupBlockTable)
    tables.block_tables = []
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        tables.commit_block_table(1)
        tables.compute_slot_mapping(1, None, None)
    names = {event.key for event in recorded.key_averages()}
    assert {serve_kernels.SLOT_SCOPE, serve_kernels.TABLE_SCOPE} <= names
