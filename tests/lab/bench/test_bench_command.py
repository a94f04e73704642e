"""``tagma bench host`` from its options to the file, with one small native scenario."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from vllm_tagma.lab.bench import schema
from vllm_tagma.lab.bench.bench_command import app

if TYPE_CHECKING:
    from conftest import Make

SMALL = ["host", "--quick", "--rounds", "2", "--only", "kv_allocator/grow"]


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_a_run_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    done = CliRunner().invoke(app, [*SMALL, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "grow_in_place" in done.output
    result = schema.read(path)
    assert [s.name for s in result.scenarios] == ["kv_allocator/grow_in_place"]
    assert result.scenarios[0].rounds == 2
    assert result.quick
    assert result.environment["versions"]["vllm"].startswith("0.3")
    assert len(result.environment["pinning"]["cpus"]) == 1


def test_compare(tmp_path: Path, make_result: Make) -> None:
    old = tmp_path / "old.json"
    result = make_result()
    result.scenarios[0].name = "kv_allocator/grow_in_place"
    schema.write(result, old)
    done = CliRunner().invoke(app, [*SMALL, "--compare", str(old)])
    assert done.exit_code == 0, done.output
    assert "compared with" in done.output
    assert "worse" in done.output  # 3 ns then; no machine grows a range in that
    assert "only in the old" in done.output


def test_list_measures_nothing() -> None:
    done = CliRunner().invoke(app, ["host", "--list", "--only", "lookup_hit/"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == [
        "manager/lookup_hit/1k",
        "manager/lookup_hit/16k",
        "manager/lookup_hit/128k",
    ]


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--only", "nix"], 2, "no scenario matches 'nix'"),
        (["--cpu", "4711"], 2, "--cpu 4711 is not available"),
        (["--compare", "absent.json"], 1, "absent.json cannot be read"),
        (["--rounds", "0"], 2, "greater than or equal to 1"),
    ],
)
def test_wrong_options(options: list[str], status: int, words: str) -> None:
    done = CliRunner().invoke(app, ["host", "--quick", *options])
    assert done.exit_code == status
    assert words in done.output
