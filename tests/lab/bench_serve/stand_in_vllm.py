"""Stands in for ``vllm`` where the runner is tested: ``serve`` listens, ``bench serve`` asks it.

It takes the real command lines and speaks the few words of the real protocol that the runner
listens to. ``STAND_IN`` in the environment (JSON) makes it misbehave; :data:`BEHAVIOUR` has the
keys.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BEHAVIOUR = {
    "journal": "",  # a file that gets a line for every server and client that starts
    "die_in": "",  # run at whose third request the server dies: backend, or backend:N for the Nth
    "never_ready": False,
    "fail_start": "",  # backend whose server ends at once
    "orphan": False,  # the server starts a child that outlives it
    "stubborn": False,  # the server does not listen to SIGTERM
    "answers": {},  # backend to what is added to each of its answers
    "delay": 0.0,  # seconds a request takes
    "slower": {},  # backend to the factor by which its times are longer
    "fail_requests": 0,
    "patient": False,  # a client that does not give up when its server is gone
    "result": True,  # whether the client writes one
}
CHOSEN = {**BEHAVIOUR, **json.loads(os.environ.get("STAND_IN", "{}"))}
INFO = 'num_gpu_blocks="101",block_size="16",enable_prefix_caching="True"'


def flag(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def note(text: str) -> int:
    """Adds a line to the journal; returns how often it is in there now."""
    if not CHOSEN["journal"]:
        return 1
    path = Path(CHOSEN["journal"])
    with path.open("a") as file:
        file.write(f"{text}\n")
    return path.read_text().splitlines().count(text)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    requests = 0
    lock = threading.Lock()


def serve() -> None:
    backend = flag("--kv-cache-backend")
    number = note(f"serve {backend}")
    print(f"stand-in server, backend {backend}", flush=True)
    if CHOSEN["fail_start"] == backend:
        print("ValueError: this is why it ended", flush=True)
        raise SystemExit(3)
    if CHOSEN["orphan"]:
        subprocess.Popen([sys.executable, __file__, "orphan", flag("--port")])
    if CHOSEN["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if CHOSEN["never_ready"]:
        time.sleep(3600)
    dies = CHOSEN["die_in"] in (backend, f"{backend}:{number}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(metrics(backend, self.server.requests) if "metrics" in self.path else "ok")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with Server.lock:
                self.server.requests += 1
                if dies and self.server.requests == 3:
                    print("RuntimeError: the engine core died", flush=True)
                    os._exit(7)
            time.sleep(CHOSEN["delay"])
            self.answer(CHOSEN["answers"].get(backend, ""))

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    Server((flag("--host"), int(flag("--port"))), Handler).serve_forever()


def metrics(backend: str, requests: int) -> str:
    lines = [
        f"vllm:cache_config_info{{{INFO}}} 1.0",
        f'vllm:kv_cache_usage_perc{{engine="0"}} {0.5 if requests else 0.0}',
        f'vllm:num_requests_running{{engine="0"}} {1 if requests else 0}',
        f'vllm:num_preemptions_total{{engine="0"}} {requests // 4}',
        f'vllm:prefix_cache_queries_total{{engine="0"}} {100 * requests}',
        f'vllm:prefix_cache_hits_total{{engine="0"}} {25 * requests}',
        f'vllm:request_success_total{{finished_reason="length"}} {requests}',
    ]
    if backend == "tagma":
        lines += [
            "# TYPE vllm:tagma_request_ranges histogram",
            'vllm:tagma_ranges{engine="0"} 6',
            'vllm:tagma_requests{engine="0"} 2',
            'vllm:tagma_max_ranges{engine="0"} 5',
            f'vllm:tagma_evicted_blocks_total{{engine="0"}} {10 * requests}',
            f'vllm:tagma_request_ranges_bucket{{le="1.0"}} {requests}',
            f'vllm:tagma_request_ranges_bucket{{le="+Inf"}} {requests}',
            f"vllm:tagma_request_ranges_sum {requests}",
            f"vllm:tagma_request_ranges_count {requests}",
        ]
    return "\n".join(lines) + "\n"


def bench() -> None:
    base = f"http://{flag('--host')}:{flag('--port')}"
    result = Path(flag("--result-dir")) / flag("--result-filename")
    note(f"bench {result.parent.name} {result.name}")
    requests = [json.loads(line) for line in Path(flag("--dataset-path")).read_text().splitlines()]
    texts = []
    for request in requests[: int(flag("--num-prompts"))]:
        body = json.dumps(request).encode()
        try:
            with urllib.request.urlopen(f"{base}/v1/completions", body, timeout=60) as response:
                texts.append(f"answer {len(request['prompt'])}" + response.read().decode())
        except OSError:
            if CHOSEN["patient"]:
                time.sleep(3600)
            raise
    slower = next(
        (f for backend, f in CHOSEN["slower"].items() if backend in result.parent.name), 1.0
    )
    if not CHOSEN["result"]:
        return
    failed = CHOSEN["fail_requests"]
    errors = ["Traceback:\nConnectionError: reset"] * failed + [""] * (len(texts) - failed)
    token = 0.01 * slower * (1 + 0.001 * (len(result.parent.name) + os.getpid() % 3))
    document = {
        "completed": len(texts) - failed,
        "failed": failed,
        "duration": 1.0,
        "output_throughput": 100.0 / token,
        "request_throughput": 10.0 / token,
        "total_token_throughput": 300.0 / token,
        "ttfts": [0.1 * slower + 0.001 * i for i in range(len(texts))],
        "itls": [[token] * 5 for _ in texts],
        "generated_texts": texts,
        "errors": errors,
    }
    for name, value in (("ttft", 100 * slower), ("tpot", 1e3 * token), ("itl", 1e3 * token)):
        document |= {f"p50_{name}_ms": value, f"p99_{name}_ms": 2 * value}
        document |= {f"median_{name}_ms": value}
    document |= {"p50_e2el_ms": 150 * slower, "p99_e2el_ms": 300 * slower}
    result.write_text(json.dumps(document))


if __name__ == "__main__":
    if sys.argv[1] == "orphan":
        time.sleep(3600)
    elif sys.argv[1] == "serve":
        serve()
    else:
        bench()
