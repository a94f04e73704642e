"""A long load on two ranks: mixed clients for as many minutes as asked, then what it left behind.

    python tests/e2e/load_run.py --minutes 60 --seed 1 --out build/load/load.json

``make load MINUTES=60 SEED=1`` runs it. A server of two tensor-parallel ranks with compaction
``live``, all laws checked and all slots audited in every step, in a pool too small for its clients
(load_clients.py). While it runs, memory of each process and the pool's figures are written down.
Then everything has to be gone, and a fair sample of the requests is asked again, one at a time and
without a prefix hit: each token has to be the same. ``--stock`` asks them of a stock vLLM server as
well, alone and all together, which also shows that this model's tokens do not depend on the batch.

The report is JSON, and a table at the end. Exit status 1 if a check failed (load_report.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from load_clients import CLIENTS, Client, Seen, body_of, resets
from load_report import check, table
from parallel_server import MAX_NUM_SEQS, POOL_BLOCKS, Server, serving
from seeded_model import write_seeded_model

_BAR = 30
_TWO_RANKS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


class Progress:
    """A bar on stderr; a line now and then where that is not a terminal."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next_line = 0.0

    def show(self, passed: float, text: str) -> None:
        """``passed``: seconds since the begin."""
        share = min(1.0, passed / self._seconds)
        full = round(share * _BAR)
        bar = f"[{'#' * full}{'-' * (_BAR - full)}] {passed / 60:5.1f}/{self._seconds / 60:.1f} min"
        if sys.stderr.isatty():
            print(f"\r{bar}  {text}", end="\n" if share == 1 else "", file=sys.stderr, flush=True)
        elif share >= self._next_line:
            self._next_line = share + 0.02
            print(f"{bar}  {text}", file=sys.stderr, flush=True)


async def load(server: Server, seconds: float, seed: int, seen: Seen) -> list[dict[str, Any]]:
    """Lets the clients run for so long; returns what was measured meanwhile."""
    began = time.monotonic()
    progress = Progress(seconds)

    def over() -> bool:
        return time.monotonic() - began >= seconds

    series: list[dict[str, Any]] = []
    timeout = aiohttp.ClientTimeout(total=900)
    # A connection for each request: the server closes idle ones after 5 seconds, and a request sent
    # at that moment would be lost without an answer.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:
        clients = [Client(number, seed, session, seen, over) for number in range(CLIENTS)]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        every = min(30.0, seconds / 6)
        tasks.append(asyncio.create_task(resets(session, seed, every, seen, over)))
        while any(not task.done() for task in tasks):
            at = time.monotonic() - began
            series.append(
                {
                    "at": round(at, 2),
                    "memory": server.memory(),
                    "metrics": await asyncio.to_thread(server.metrics),
                }
            )
            done = f"{sum(seen.counts.values())} requests, {seen.tokens} tokens"
            progress.show(at, done + f", {len(seen.errors)} errors" * bool(seen.errors))
            await asyncio.wait(tasks, timeout=min(10.0, seconds / 20))
        await asyncio.gather(*tasks)
    return series


def left_behind(server: Server) -> dict[str, Any]:
    """The pool's figures after the load, and after a reset and one request of less than a block."""
    idle = server.wait_idle(120)
    time.sleep(1.0)
    after = server.metrics()
    reset = server.reset(running_too=False)
    server.call("/v1/completions", body_of([5, 6, 7], 2))  # figures travel with steps
    time.sleep(1.0)
    return {"idle": idle, "reset": reset, "after": after, "empty": server.metrics()}


def last_audits(log: str) -> dict[str, str]:
    """The last line of each rank about its slots, by the rank's name in the log."""
    audits = {}
    for line in log.splitlines():
        found = re.search(
            r"(Worker_TP\d+).*(debug_slots: [1-9]\d* slots .*, 0 without a slot)", line
        )
        if found:
            audits[found[1]] = found[2]
    return audits


async def ask_again(server: Server, seen: Seen, *, together: bool) -> list[list[int]]:
    """The samples' tokens, each without a prefix hit: one at a time, or as many as fit together."""
    timeout = aiohttp.ClientTimeout(total=900)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:
        gate = asyncio.Semaphore(MAX_NUM_SEQS if together else 1)

        async def one(number: int) -> list[int]:
            sample = seen.samples[number]
            salt = f"again-{together}-{number}"
            body = body_of(sample.prompt, len(sample.tokens), cache_salt=salt)
            async with gate, session.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                return list((await response.json())["choices"][0]["token_ids"])

        return list(await asyncio.gather(*(one(n) for n in range(len(seen.samples)))))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    write_seeded_model(model)
    seen = Seen(options.samples, options.seed)
    with serving(
        "tagma", model, options.out.with_suffix(".tagma.log"), *_TWO_RANKS, blocks=options.blocks
    ) as server:
        series = asyncio.run(load(server, options.minutes * 60, options.seed, seen))
        left = left_behind(server)
        again = {"tagma alone": asyncio.run(ask_again(server, seen, together=False))}
    if options.stock:
        with serving(
            "paged",
            model,
            options.out.with_suffix(".stock.log"),
            *_TWO_RANKS,
            blocks=options.blocks,
        ) as server:
            for name, together in (("stock alone", False), ("stock together", True)):
                again[name] = asyncio.run(ask_again(server, seen, together=together))
    expected = [sample.tokens for sample in seen.samples]
    log = options.out.with_suffix(".tagma.log").read_text(errors="replace")
    # Told to end, vLLM kills its engine and then complains that it is dead.
    while_serving = log.partition("[shutdown] API server: shutdown triggered")[0]
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "blocks": options.blocks,
        "counts": dict(seen.counts),
        "tokens": seen.tokens,
        "seconds": sorted(seen.seconds),
        "errors": seen.errors,
        "series": series,
        "left": left,
        "samples": {
            "count": len(expected),
            "kinds": sorted({sample.kind for sample in seen.samples}),
            "different": {
                name: [
                    n
                    for n, pair in enumerate(zip(expected, tokens, strict=True))
                    if pair[0] != pair[1]
                ]
                for name, tokens in again.items()
            },
            "stock_unstable": [
                n
                for n, pair in enumerate(
                    zip(again.get("stock alone", []), again.get("stock together", []), strict=True)
                )
                if pair[0] != pair[1]
            ],
        },
        "audits": last_audits(log),
        "complaints": [
            line
            for line in while_serving.splitlines()
            if "law " in line or "EngineDeadError" in line
        ][:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=POOL_BLOCKS, help="of the pool")
    parser.add_argument("--samples", type=int, default=150, help="requests that are asked again")
    parser.add_argument("--stock", action="store_true", help="ask them of a stock server too")
    parser.add_argument("--out", type=Path, default=Path("build/load/load.json"))
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes}; it has to be above 0")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = run(options, Path(folder))
    report["checks"] = check(report)
    options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(table(report))
    print(f"\nreport: {options.out}")
    sys.exit(0 if all(found["passed"] for found in report["checks"]) else 1)


if __name__ == "__main__":
    main()
