"""``tagma map`` against a web server that answers as a vLLM server does, and as others do.

The metrics are written by our own logger into a registry of this test; the e2e test does the same
against a real server.
"""

from __future__ import annotations

import functools
import io
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console
from typer.testing import CliRunner

from vllm_tagma import metrics
from vllm_tagma.cli import app
from vllm_tagma.integration.stat_logger import TagmaStatLogger
from vllm_tagma.lab.pool_map.map_drawing import changes, draw, merged
from vllm_tagma.lab.pool_map.map_source import EnginePool, MapError, metrics_url, read_pools

GAUGES = {
    "rows": 4,
    "row_ranges": 6,
    "max_row_ranges": 3,
    "one_range_rows": 3,
    "live_blocks": 160,
    "idle_blocks": 96,
    "hole_blocks": 64,
    "holes": 2,
    "largest_hole_blocks": 48,
    "headroom_blocks": 9,
    "slack_blocks": 10,
    "pinned_blocks": 0,
}
# 320 blocks in 64 parts of 5: half is live, then 0.3 cached, then empty but for one block.
PARTS = {i: (5, 0) if i < 32 else (0, 5) if i < 51 else (0, 0) for i in range(64)} | {51: (0, 1)}


class Exporter:
    """A front end's metrics, without vLLM's."""

    def __init__(self, engines: tuple[int, ...] = (0,)) -> None:
        self.registry = CollectorRegistry()
        make = functools.partial(functools.partial, registry=self.registry)
        self.logger = TagmaStatLogger(
            SimpleNamespace(
                per_engine_labelvalues={i: ["tiny", str(i)] for i in engines},
                _gauge_cls=make(Gauge),
                _counter_cls=make(Counter),
                _histogram_cls=make(Histogram),
            )
        )

    def record(self, engine: int = 0, **changes: Any) -> Exporter:
        message = metrics.Message(**{"gauges": GAUGES, "parts": PARTS, **changes})
        stats = SimpleNamespace(num_kv_fetch_reqs_by_stage=message.pack())
        self.logger.record(stats, None, engine_idx=engine)
        return self

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def pools(self) -> list[EnginePool]:
        return read_pools(self.text(), address="http://test/metrics")


class Server:
    """Answers ``/metrics`` with ``body``, to whoever brings ``key`` if one is set."""

    def __init__(self) -> None:
        self.body = ""
        self.key: str | None = None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given = self.headers.get("Authorization")
                if owner.key is not None and given != f"Bearer {owner.key}":
                    self.send_error(401)
                elif self.path != "/metrics":
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(owner.body.encode())

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["map", *arguments], env={"COLUMNS": "100", **environment})
    return result.exit_code, result.stdout, result.stderr


def shown(pools: list[EnginePool], *, width: int, encoding: str = "utf-8") -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, color_system=None, highlight=False)
    console.print(draw(pools, console))
    stream.seek(0)
    return [line.rstrip() for line in stream.read().splitlines()]


# ---- what is shown ------------------------------------------------------------------------------


def test_the_pool_is_drawn_by_address_with_its_figures(server: Server) -> None:
    server.body = Exporter().record(added={"evictions": 1234, "moved_live_blocks": 7}).text()
    code, out, _ = run(server.url)
    assert code == 0
    row, *figures, legend = out.splitlines()
    assert row.rstrip() == "engine 0 " + "█" * 32 + "▒" * 19 + "·" * 13
    assert [line.strip() for line in figures] == [
        "tiny: 320 blocks, 50% live, 30% cached, 20% in 2 holes, the largest 48",
        "4 requests in 6 ranges: mean 1.50, max 3, 75% in one; headroom 9",
        "evicted 1,234, moved 0 cached and 7 live blocks",
    ]
    assert legend.split() == ["by", "address:", "█", "live", "▒", "cached", "·", "hole"]


def looks_apart() -> tuple[list[EnginePool], list[EnginePool]]:
    """One pool, before and after a step: the last live part empties, two cached ones fill."""
    exporter = Exporter().record(added={"moved_live_blocks": 7, "evictions": 5})
    before = exporter.pools()
    gauges = {**GAUGES, "row_ranges": 9, "holes": 1, "pinned_blocks": 12, "live_blocks": 165}
    parts = {31: (0, 0), 40: (5, 0), 41: (5, 0)}
    exporter.record(gauges=gauges, parts=parts, added={"moved_live_blocks": 1200})
    return before, exporter.pools()


def test_a_watcher_sees_what_changed_and_where() -> None:
    before, after = looks_apart()
    stream = io.StringIO()
    console = Console(file=stream, width=73, color_system=None, highlight=False)
    console.print(draw(after, console, before=before))
    cells, marks, *lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert marks == " " * len("engine 0 ") + " " * 31 + "-" + " " * 8 + "++"
    assert cells[len("engine 0 ") + 31] == "·"
    assert "  pinned 12 blocks; 0 transfers in 0 runs, 0 block by block" in lines
    assert changes(before[0], after[0]) == (
        "since the last look: ranges +3, live +5, holes -1, pinned +12, moved live 1,200"
    )
    assert "since the last look: ranges +3" in lines[0]
    again = changes(after[0], after[0])
    assert again == "since the last look: no change"


def test_a_server_that_restarted_is_counted_anew() -> None:
    before, after = looks_apart()
    assert changes(after[0], before[0]).endswith("pinned -12, moved live 7")


def test_transfers_are_shown_with_those_that_were_not_merged() -> None:
    labels = 'engine="0",model_name="tiny"'
    text = Exporter().record().text() + "".join(
        f"vllm:tagma_transfer_{name}_total{{{labels}{more}}} {value}\n"
        for name, more, value in (
            ("merged", "", 6),
            ("runs", "", 8),
            ("unmerged", ',reason="a"', 2),
            ("unmerged", ',reason="b"', 3),
        )
    )
    (pool,) = read_pools(text, address="http://test/metrics")
    assert (pool.transfers, pool.transfer_runs, pool.transfers_unmerged) == (6, 8, 5)
    assert "  pinned 0 blocks; 6 transfers in 8 runs, 5 block by block" in shown([pool], width=90)


def test_the_limit_of_ranges_is_shown_when_it_was_reached() -> None:
    lines = shown(Exporter().record(added={"cap_refusals": 2}).pools(), width=90)
    assert "  limit of ranges reached: 0 evictions out of order, 2 refusals" in lines


def test_engines_come_in_order_of_their_number() -> None:
    exporter = Exporter((10, 2, 0))
    for engine in (10, 0):
        exporter.record(engine)
    lines = shown(exporter.pools(), width=90)
    heads = [line.split()[1] for line in lines if line.startswith("engine")]
    assert heads == ["0", "2", "10"]
    assert "engine 2 no figures yet: the engine sends them with its first request" in lines


@pytest.mark.parametrize(("width", "cells"), [(73, 64), (72, 63), (40, 31), (10, 1), (150, 128)])
def test_the_row_fits_the_terminal(width: int, cells: int) -> None:
    row = shown(Exporter().record().pools(), width=width)[0].removeprefix("engine 0 ")
    assert len(row) == cells
    assert row[0] == "█"


def test_other_encodings_get_other_characters() -> None:
    row = shown(Exporter().record().pools(), width=80, encoding="ascii")[0]
    assert row == "engine 0 " + "#" * 32 + "+" * 19 + "." * 13


def test_colours_tell_the_mixture() -> None:
    def style(live: int, cached: int) -> str:
        (pool,) = Exporter().record(parts={0: (live, cached)}).pools()
        stream = io.StringIO()
        console = Console(file=stream, width=80, force_terminal=True, color_system="truecolor")
        console.print(draw([pool], console))
        return stream.getvalue().split("38;2;")[1].split("m")[0]

    assert style(320, 0) == "222;92;52"
    assert style(0, 320) == "66;133;190"
    assert style(0, 0) == "72;72;72"
    assert style(160, 160) == "144;112;121"


def test_merging_keeps_the_sums() -> None:
    rng = random.Random(7)
    for _ in range(200):
        parts = [(rng.randrange(9), rng.randrange(9), 20) for _ in range(rng.randint(1, 80))]
        for width in (1, rng.randint(1, 90), len(parts)):
            found = merged(parts, width)
            assert len(found) == min(width, len(parts))
            assert [sum(column) for column in zip(*found, strict=True)] == [
                sum(column) for column in zip(*parts, strict=True)
            ]
            sizes = {size for _, _, size in found}
            assert max(sizes) - min(sizes) <= 20


def test_parts_cover_the_pool_when_it_does_not_divide() -> None:
    gauges = {**GAUGES, "live_blocks": 3, "idle_blocks": 0, "hole_blocks": 97}
    exporter = Exporter()
    message = metrics.Message(gauges=gauges, parts=dict.fromkeys(range(64), (0, 0)))
    exporter.logger.record(SimpleNamespace(num_kv_fetch_reqs_by_stage=message.pack()), None)
    (pool,) = exporter.pools()
    assert sum(size for _, _, size in pool.parts) == pool.blocks == 100


def test_a_server_without_the_map_shows_the_figures() -> None:
    lines = shown(Exporter().record(parts={}).pools(), width=90)
    assert lines[0] == "engine 0 no map: the server runs with tagma.pool_map_parts 0"
    assert "4 requests in 6 ranges" in lines[2]


def test_json_has_the_same_figures(server: Server) -> None:
    server.body = Exporter().record(added={"evictions": 5}).text()
    code, out, _ = run(server.url, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["url"] == server.url
    (engine,) = found["engines"]
    assert engine["parts"][51] == [0, 1, 5]
    assert {key: engine[key] for key in ("engine", "model", "blocks", "mean_ranges")} == {
        "engine": "0",
        "model": "tiny",
        "blocks": 320,
        "mean_ranges": 1.5,
    }
    assert (engine["live"], engine["cached"], engine["hole"], engine["evicted"]) == (160, 96, 64, 5)


def test_watching_ends_with_the_server(server: Server) -> None:
    server.body = Exporter().record().text()
    tagma = Path(sys.executable).with_name("tagma")
    command = [str(tagma), "map", server.url, "--watch", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        rows = 0
        while rows < 3:
            rows += process.stdout.readline().startswith("engine 0")
        text = "".join(process.stdout.readline() for _ in range(3))
        assert "since the last look: no change" in text
        server.close()
        assert process.wait(30) == 1
        assert "tagma map: no server answers" in process.stderr.read()


def test_ctrl_c_ends_watching_without_an_error(server: Server) -> None:
    server.body = Exporter().record().text()
    tagma = Path(sys.executable).with_name("tagma")
    command = [str(tagma), "map", server.url, "--watch", "0.1", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert second["time"] > first["time"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


# ---- where it is read from ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000/metrics"),
        ("http://localhost:8000/", "http://localhost:8000/metrics"),
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("localhost:8000/v1", "http://localhost:8000/metrics"),
        ("https://host/base/v1/", "https://host/base/metrics"),
        ("http://host:1/metrics", "http://host:1/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_addresses_as_people_paste_them(url: str, expected: str) -> None:
    assert metrics_url(url) == expected


@pytest.mark.parametrize("url", ["file:///etc/hosts", "ftp://host", "http://", ""])
def test_an_address_of_something_else_is_an_error(url: str) -> None:
    with pytest.raises(MapError, match=r"is not the address of a server.*http://localhost:8000"):
        metrics_url(url)


def test_nobody_answers(server: Server) -> None:
    server.close()
    code, out, error = run(server.url)
    assert (code, out) == (1, "")
    assert f"no server answers at {server.url}/metrics" in error
    assert "vllm serve MODEL --kv-cache-backend tagma" in error


def test_a_key_is_sent_where_one_is_wanted(server: Server) -> None:
    server.body = Exporter().record().text()
    server.key = "secret"
    code, _, error = run(server.url)
    assert code == 1
    assert "HTTP 401" in error
    assert "--api-key or VLLM_API_KEY" in error
    assert run(server.url, "--api-key", "secret")[0] == 0
    assert run(server.url, VLLM_API_KEY="secret")[0] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('vllm:num_requests_running{engine="0"} 0\n', "on the paged backend.*--kv-cache-backend"),
        ("process_open_fds 7\n", "no metrics of vLLM.*--disable-log-stats"),
        ("", "no metrics of vLLM"),
        ("<!DOCTYPE html>\n<html><body>It works</body></html>\n", "not a vLLM server"),
        ('vllm:tagma_requests{engine="0",model_name="m"} 1\n', "another version of vllm-tagma"),
    ],
    ids=["paged", "other", "empty", "html", "version"],
)
def test_a_server_of_another_kind(server: Server, body: str, message: str) -> None:
    server.body = body
    code, out, error = run(server.url)
    assert (code, out) == (1, "")
    with pytest.raises(MapError, match=message):
        read_pools(body, address=f"{server.url}/metrics")
    assert error.startswith("tagma map: ")


def test_no_metrics_at_that_address(server: Server) -> None:
    code, _, error = run(f"{server.url}/elsewhere")
    assert code == 1
    assert "/elsewhere/metrics does not exist (HTTP 404): this is not a vLLM server" in error


def test_once_and_watch_exclude_each_other() -> None:
    code, _, error = run("http://localhost", "--once", "--watch", "1")
    assert code == 2
    assert "--once and --watch exclude each other" in " ".join(error.split())
