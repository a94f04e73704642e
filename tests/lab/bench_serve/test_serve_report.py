"""The report of a series that was written by hand: sections, numbers, pictures, words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from vllm_tagma.lab.bench_serve import record, serve_kernels
from vllm_tagma.lab.bench_serve.record import RunRecord, SeriesRecord, StageRecord
from vllm_tagma.lab.bench_serve.serve_kernels import ATTENTION, OTHER, SLOTS, TABLE, WRITES
from vllm_tagma.lab.bench_serve.serve_plan import runs_of
from vllm_tagma.lab.report import serve_charts, serve_files, serve_prose
from vllm_tagma.lab.report.report_command import report
from vllm_tagma.lab.report.serve_sections import number

STAGES = ("outputs", "chat-c4", "turns-c4")
SECTIONS = [
    *("In short", "Verdict by measure", "Side by side", "The same answers"),
    *("Latency distributions", "KV cache and memory", "Where a step goes", "Requests", "Runs"),
    *("Method", "Machine, versions, settings", "What is not shown"),
]


@pytest.fixture
def series(settings_of, tmp_path: Path) -> Path:
    """Three pairs; tagma takes 0.9 of paged's time for a token, and the first token alike."""
    settings = settings_of(repeats=3, profile_kernels=True)
    folder = tmp_path / "series"
    runs = runs_of(settings)
    environment = {
        "machine": {"cpu": "Example <CPU>", "cpus_online": 2, "load_average": [0.1, 0.1, 0.1]},
        "versions": {"vllm": "0.32.0", "vllm_tagma": "9.8.7"},
        "source": {"commit": "0123abc", "modified": False},
        "gpus": [],
    }
    record.write_series(
        SeriesRecord(
            created="2026-01-01T00:00:00+00:00",
            command="tagma bench serve",
            plan=record.Plan(settings=settings.to_json(), facts={"vllm": "0.32.0"}),
            environment=environment,
            workload={
                name: {
                    "requests": 4,
                    "prompt_tokens": 1234,
                    "prompt_tokens_least": 1,
                    "prompt_tokens_median": 2,
                    "prompt_tokens_most": 3,
                    "output_tokens": 8,
                    "sha256": "f" * 64,
                }
                for name in STAGES
            },
            runs=[run.name for run in runs],
            seconds=12.0,
        ),
        folder,
    )
    for run in runs:
        _write_run(folder, run)
    return folder


def _write_run(folder: Path, run) -> None:
    token = (0.9 if run.backend == "tagma" else 1.0) * (10.0 + 0.01 * run.index)
    place = folder / "runs" / run.name
    stages = {}
    for name in STAGES if run.pair is not None else ():
        stages[name] = StageRecord(
            seconds=1.0,
            client={
                "output_throughput": 1000.0 / token,
                "p50_tpot_ms": token,
                "p99_tpot_ms": 2 * token,
                "p50_ttft_ms": 50.0 + (run.index % 2) * 0.5,
            },
            counters={"prefix_queries": 100.0, "prefix_hits": 40.0, "preemptions": 2.0},
            kv={"peak_usage": 0.5, "peak_blocks": 50},
            memory={"rss_peak": 3 << 30, "gpu_peak": None},
            ranges={"request_ranges_mean": 1.25} if run.backend == "tagma" else {},
        )
        detail = {
            "ttfts": [0.05, 0.06],
            "itls": [[token / 1000] * 3, []],
            "generated_texts": ["one", "two"],
        }
        (place / f"{name}.json").parent.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.json").write_text(json.dumps(detail))
    shares = {SLOTS: 0.002, TABLE: 0.02, ATTENTION: 0.3, WRITES: 0.01, OTHER: 0.668}
    recorded = {
        "on": "gpu",
        "steps": 10,
        "step_us": 1e4,
        "shares": shares,
        "us": {key: 1e4 * share for key, share in shares.items()},
        "top": [["flash_kernel", 3000.0]],
    }
    record.write_run(
        RunRecord(
            index=run.index,
            name=run.name,
            backend=run.backend,
            pair=run.pair,
            started="2026-01-01T00:00:00+00:00",
            num_blocks=101,
            block_size=16,
            stages=stages,
            kernels=recorded if run.pair is None else None,
        ),
        place,
    )
    sample = {"kv_usage": 0.5, "running": 2, "rss_bytes": 3 << 30, "gpu_bytes": None}
    lines = [json.dumps({"t": t, **sample}) for t in (30.0, 31.0)]
    (place / "samples.jsonl").write_text("\n".join([*lines, '{"t": 32.0, "kv_us']))


def text_of(series: Path, output: Path) -> str:
    (_, text), _ = serve_files.write_series_report(series, output)
    return text.read_text()


def test_sections_and_numbers(series: Path, tmp_path: Path) -> None:
    text = text_of(series, tmp_path / "out")
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    assert "Verdict: gain. It rests on chat-c4, output tokens +11." in text
    assert "| chat-c4 | time per output token, p50 (ms) | 10.04 | 9.03 | -10.0 % |" in text
    assert "time to first token, p50 (ms) | 50.5 | 50 | -" in text
    assert "| outputs | 2 | 0 | 0 | 0 | yes |" in text
    assert "| chat-c4 | prefix-hit rate (%) | 40 | 40 |" in text
    assert "| chat-c4 | ranges a request held at its end, mean | – | 1.25 |" in text
    assert "paged: 101 blocks of 16 positions." in text
    # 2 % of expansion and a tenth of 30 % of attention.
    assert "The share justifies range reads in attention" in text
    assert "5.00% together at best" in text
    assert not re.search(r"\bnan\b|\binf\b", text)
    # The page needs nothing else.
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "Example &lt;CPU&gt;" in page
    assert set(re.findall(r'src="(.{15})', page)) == {"data:image/svg+"}
    figures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert figures == [
        *("kernels.svg", "latency-chat-c4.svg", "latency-turns-c4.svg", "memory.svg"),
    ]
    for name in figures:
        ElementTree.parse(tmp_path / "out" / "figures" / name)


def test_an_interrupted_series_is_reported_as_far_as_it_went(series: Path, tmp_path: Path) -> None:
    for name in ("04-paged", "05-paged", "06-tagma", "07-paged-kernels", "08-tagma-kernels"):
        (series / "runs" / name / "run.json").unlink()
    text = text_of(series, tmp_path / "out")
    assert "Verdict: not measured. There are not two pairs of complete runs" in text
    assert "Only 3 of 6 runs are complete" in text
    assert "## Where a step goes" not in text


def test_a_package_that_changed_meanwhile_is_a_doubt(series: Path) -> None:
    words = "The files of vllm-tagma changed while the series ran"
    found = record.read_series(series)
    runs = record.read_runs(series, found)
    assert words not in " ".join(serve_prose.not_shown(found, runs))
    runs[1].package = "another"
    assert words in " ".join(serve_prose.not_shown(found, runs))


def test_nothing_measured_is_a_report_as_well(series: Path, tmp_path: Path) -> None:
    for path in series.glob("runs/*/run.json"):
        path.unlink()
    text = text_of(series, tmp_path / "out")
    assert "Verdict: not measured" in text
    assert "Only 0 of 6 runs" in text


def test_the_report_command_takes_a_folder(series: Path, tmp_path: Path) -> None:
    for path in series.glob("runs/*/run.json"):
        path.unlink()
    app = typer.Typer()
    app.command()(report)
    done = CliRunner().invoke(app, [str(series), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "report.html").exists()
    done = CliRunner().invoke(app, [str(tmp_path), "--output", str(tmp_path / "o")])
    assert done.exit_code == 1
    assert "series.json cannot be read" in done.output
    done = CliRunner().invoke(app, [str(series), "x.json", "--output", str(tmp_path / "o")])
    assert (done.exit_code, "is reported alone" in done.output) == (1, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "other"}, "is not a result of 'tagma bench serve'"),
        ({"schema_version": 2}, "has schema_version 2; this release reads 1"),
    ],
)
def test_other_files_are_refused(series: Path, change: dict, words: str) -> None:
    path = series / "series.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(record.RecordError, match=words):
        record.read_series(series)


def test_a_record_survives_the_file(series: Path) -> None:
    run = record.read_run(series / "runs" / "02-tagma")
    record.write_run(run, series / "again")
    assert record.read_run(series / "again") == run
    assert serve_kernels.CATEGORIES


def test_curves_are_thinned_but_keep_their_ends() -> None:
    values, shares = serve_charts.curve(range(10_000))
    assert len(values) <= 300
    assert (values[0], values[-1], shares[0], shares[-1]) == (0, 9999, 0, 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (0.01234, "0.0123"),
        (12.346, "12.35"),
        (123.46, "123.5"),
        (12345, "12,345"),
    ],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number(value) == text
