"""``tagma replay`` as typed: table, result file, pictures, exit codes."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from vllm_tagma.cli import app
from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.replay_command import Format

if TYPE_CHECKING:
    from conftest import Write

LINE = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]})


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    words = ["replay", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "100"}, input=stdin)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any], Path]:
    """The shipped trace, both backends, with result file and pictures."""
    folder = tmp_path_factory.mktemp("replay")
    result = run("--limit", 30, "--json", folder / "r.json", "--plot", folder / "plots")
    assert result.exit_code == 0, result.output
    return result, json.loads((folder / "r.json").read_text()), folder / "plots"


def test_the_table_has_both_backends(replayed: tuple[Result, dict[str, Any], Path]) -> None:
    result, written, _ = replayed
    output = result.output
    assert "mixed.jsonl (tagma): 30 requests" in output
    row = next(line for line in output.splitlines() if line.strip().startswith("own ranges: mean"))
    shown = [float(word.replace(",", "")) for word in row.split()[-2:]]
    for name, value in zip(("paged", "tagma"), shown, strict=True):
        counted = written["backends"][name]["counters"]["own_ranges"]["mean"]
        assert value == pytest.approx(counted, abs=0.5)
    for label in (
        *("prefix-hit rate", "preemptions", "running requests a step", "live occupancy"),
        *("blocks evicted", "blocks moved", "descriptors", "allocate_slots", "step: mean"),
    ):
        assert label in output


def test_the_backends_are_compared(replayed: tuple[Result, dict[str, Any], Path]) -> None:
    result, written, _ = replayed
    paged, tagma = (written["backends"][name]["counters"] for name in ("paged", "tagma"))
    fewer = paged["own_ranges"]["mean"] / tagma["own_ranges"]["mean"]
    points = 100 * (tagma["hit_rate"] - paged["hit_rate"])
    line = f"tagma against paged: {fewer:.1f} times fewer own ranges, hit rate {points:+.2f} points"
    assert line in " ".join(result.output.split())


def test_the_result_file(replayed: tuple[Result, dict[str, Any], Path]) -> None:
    _, written, _ = replayed
    assert (written["kind"], written["schema_version"]) == ("tagma-replay", 1)
    assert list(written) == [
        *("kind", "schema_version", "created", "command", "trace", "seed", "limit", "num_blocks"),
        *("settings", "environment", "backends"),
    ]
    assert written["trace"]["requests"] == 30
    assert written["settings"]["watermark"] == 0.02
    assert list(written["backends"]) == ["paged", "tagma"]
    spread = ["mean", "p50", "p95", "p99", "max"]
    for backend in written["backends"].values():
        counters = backend["counters"]
        assert list(counters) == [
            *("requests", "unfit", "stuck", "steps", "scheduled_tokens", "own_ranges"),
            *("total_ranges", "one_range_share", "prompt_tokens", "hit_tokens", "hit_rate"),
            *("preemptions", "concurrency", "live_occupancy", "evicted_blocks", "moved_blocks"),
            *("descriptors", "groups"),
        ]
        (group,) = counters["groups"]
        assert list(group) == ["name", "regions", "own_ranges", "total_ranges"]
        assert group["own_ranges"] == counters["own_ranges"]
        assert (group["name"], group["regions"]) == ("full, 1 layer", 64)
        for name in ("own_ranges", "total_ranges", "descriptors"):
            assert list(counters[name]) == spread
            assert counters[name]["p50"] <= counters[name]["p99"] <= counters[name]["max"]
        assert counters["own_ranges"]["mean"] <= counters["total_ranges"]["mean"]
        assert list(backend["times"]) == [
            *("wall_seconds", "requests_per_second", "step_us", "calls"),
            "calls_timed_every_steps",
        ]


def test_the_pictures(replayed: tuple[Result, dict[str, Any], Path]) -> None:
    result, _, plots = replayed
    assert sorted(path.name for path in plots.iterdir()) == ["hits.svg", "pool.svg", "ranges.svg"]
    for path in plots.iterdir():
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag.endswith("svg")
        assert f"{path} written" in result.output.replace("\n", "")
    # Two backends, the whole pool and its middle.
    images = ET.parse(plots / "pool.svg").getroot().iter("{http://www.w3.org/2000/svg}image")
    assert len(list(images)) == 4


def test_one_backend_of_a_generated_load(tmp_path: Path) -> None:
    path = tmp_path / "not there yet" / "r.json"
    result = run(
        *("--load", "agent", "--limit", 20, "--max-num-seqs", 4, "--backend", "tagma"),
        *("--block-size", 32, "--json", path),
    )
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert list(written["backends"]) == ["tagma"]
    assert written["backends"]["tagma"]["counters"]["hit_rate"] > 0.2


def test_bad_lines_are_reported_and_skipped(write: Write) -> None:
    path = write("\n".join([LINE, *["{"] * 7]))
    # The pool is too small on purpose: the check comes after the reading, and costs no replay.
    few, all_of_them = (run(path, "--memory", 1, *more) for more in ((), ("--verbose",)))
    assert f"{path.name}, line 2: is not JSON" in few.output
    assert f"{path.name}, line 7" not in few.output
    assert "7 bad lines skipped, 2 more with --verbose" in few.output
    assert f"{path.name}, line 8: is not JSON" in all_of_them.output
    strict = run(path, "--strict")
    assert strict.exit_code == 2
    assert f"{path}, line 2: is not JSON" in strict.output.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-file.jsonl"], "no-such-file.jsonl cannot be read"),
        (["--memory", "much"], "--memory much is neither a number of blocks nor a multiple"),
        (["--max-num-batched-tokens", "8"], "--max-num-batched-tokens 8 is less than"),
        (["--load", "chat", "trace.jsonl"], "give no TRACE"),
        (["--load", "poem"], "poem"),
        (["--compaction", "sometimes"], "sometimes"),
        (["--limit", "0"], "greater than or equal to 1"),
        (["--format", "csv"], "csv"),
        (["--format", "azure"], "--format and --trace-block-size need a TRACE"),
        (["--trace-block-size", "0"], "greater than or equal to 1"),
        (["--load", "chat", "--trace-block-size", "16"], "no --trace-block-size"),
    ],
)
def test_wrong_options(arguments: list[str], reason: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


def test_a_trace_from_a_pipe_and_what_was_assumed_of_it() -> None:
    """Reading only: the pool is too small on purpose."""
    lines = "".join(
        json.dumps({"input_length": n, "output_length": 5, "hash_ids": list(range(-(-n // 16)))})
        + "\r\n"
        for n in (100, 230)
    )
    result = run("-", "--memory", 1, stdin=gzip.compress(lines.encode("utf-16")))
    assert "standard input: a hash id covers 16 tokens, as the lengths say" in result.output
    assert "gives a pool of 1 blocks" in result.output
    result = run("-", "--memory", 1, "--trace-block-size", 8, stdin=lines.encode())
    assert result.exit_code == 2
    reason = "line 1: has 7 hash_ids for input_length 100, which is 13 blocks of 8 tokens"
    assert f"standard input has no valid request (2 bad lines; the first: {reason}" in result.output
    assert isinstance(result.exception, SystemExit), "not a traceback"


def test_the_option_knows_every_format() -> None:
    assert [kind.value for kind in Format] == list(formats.PARSERS)


def test_what_does_not_fit_is_said(write: Write) -> None:
    long = json.dumps({"prompt": [["a", 4000]], "output": 9})
    short = json.dumps({"prompt": [["a", 90]], "output": 9})
    result = run(write(f"{short}\n{long}\n"), "--memory", 64, "--backend", "tagma")
    assert result.exit_code == 0
    assert "tagma: 1 requests need more than the whole pool" in result.output
    assert "line 2" in result.output


def test_without_matplotlib_nothing_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = run("--plot", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'vllm-tagma[bench]'" in result.output
    assert "own ranges" not in result.output
