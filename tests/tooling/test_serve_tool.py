"""`make serve`: early failures of the real command, the curl line, the end of its child."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import host
import serve
from models import Model
from progress import SetupFailure

MODEL = Model("/models/It's a model", "It's a model")


def run_make(root, *variables):
    return subprocess.run(
        ["make", "--no-print-directory", "serve", f"PYTHON={sys.executable}", *variables],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_make_serve_on_a_port_in_use_fails_at_once(root):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = run_make(root, f"PORT={port}")
    assert result.returncode != 0
    assert f"Port {port} on 127.0.0.1 is in use" in result.stderr
    assert "[1/" not in result.stdout, "nothing may be built before the port is known to be free"


def test_make_serve_with_a_wrong_model_fails_at_once(root):
    result = run_make(root, "PORT=18973", "MODEL=./no such 'model'")
    assert result.returncode != 0
    assert "MODEL=./no such 'model' is neither a folder that exists" in result.stderr
    assert "[1/" not in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--port 9000", "give it as PORT="),
        ("--host=0.0.0.0", "give it as HOST="),
        ("--seed 'open", "cannot be split"),
    ],
)
def test_args_that_cannot_be_taken(args, says):
    with pytest.raises(SetupFailure, match=says):
        serve.split_args(args)


def test_user_flags_come_last_and_override():
    words = serve.split_args("--max-model-len 512 --hf-overrides '{\"a\": 1}'")
    command = serve.serve_command(
        vllm="vllm",
        model=MODEL,
        host_name="::1",
        port=1,
        kv_bytes=host.GIB,
        dtype="float32",
        extra=words,
    )
    assert command[command.index("--dtype") + 1] == "float32"
    assert command[-4:] == ["--max-model-len", "512", "--hf-overrides", '{"a": 1}']
    assert command[command.index("--kv-cache-backend") + 1] == "tagma"


def test_kv_memory_is_sized_from_what_is_left():
    small = Model("m", "m", weight_bytes=host.GIB)
    floor = serve.RUNTIME_BYTES + host.GIB + serve.MIN_KV_BYTES
    assert serve.kv_cache_bytes(model=small, available=floor) == serve.MIN_KV_BYTES
    assert serve.kv_cache_bytes(model=small, available=floor + host.GIB) > serve.MIN_KV_BYTES
    assert serve.kv_cache_bytes(model=small, available=1 << 50) == serve.MAX_KV_BYTES
    wide = floor + host.GIB
    assert serve.kv_cache_bytes(model=small, available=wide, widened=True) == serve.MIN_KV_BYTES
    with pytest.raises(SetupFailure, match=r"Only 3\.7 GiB of memory .* m needs 3\.8 GiB"):
        serve.kv_cache_bytes(model=small, available=floor - (1 << 20) * 64)


@pytest.mark.parametrize("has_chat", [True, False])
def test_curl_line_works_when_pasted(has_chat):
    seen = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.update(path=self.path, body=json.loads(body), headers=dict(self.headers))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model = Model(MODEL.source, MODEL.name, has_chat=has_chat)
    extra = ["--api-key", "se'cret"]
    line = serve.curl_line(model=model, host_name="0.0.0.0", port=server.server_port, extra=extra)
    assert "\n" not in line
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=30)
    server.shutdown()
    server.server_close()
    assert answer.stdout == "hello"
    assert seen["body"]["model"] == "It's a model"
    assert seen["path"] == ("/v1/chat/completions" if has_chat else "/v1/completions")
    assert ("messages" if has_chat else "prompt") in seen["body"]
    assert seen["headers"]["Content-Type"] == "application/json"
    assert seen["headers"]["Authorization"] == "Bearer se'cret"


def test_curl_line_uses_the_served_name():
    extra = ["--served-model-name=other"]
    line = serve.curl_line(model=MODEL, host_name="::", port=80, extra=extra)
    assert '"model": "other"' in line
    assert "http://[::1]:80/v1" in line


def test_server_that_ends_before_it_is_ready():
    process = serve.start([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    with pytest.raises(SetupFailure, match="ended with status 3 before it was ready"):
        serve.wait_until_ready(process, host_name="127.0.0.1", port=9)


def test_stop_ends_children_that_ignore_it(tmp_path):
    """A child in the server's group that ignores SIGTERM, as a hanging engine might."""
    pid_file = tmp_path / "pid"
    child = tmp_path / "child"
    child.write_text(f"trap '' TERM; echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}\n")
    with child.open("a") as script:
        script.write("while true; do sleep 0.1; done\n")
    process = serve.start(["bash", "-c", f"bash {child} & wait"], dict(os.environ))
    while not pid_file.exists():
        time.sleep(0.02)
    child_pid = int(pid_file.read_text())
    assert alive(child_pid)
    serve.stop(process)
    assert process.returncode is not None
    assert wait_gone(child_pid)


def test_server_ends_with_a_parent_that_was_killed(tmp_path, root):
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import serve\n"
        "child = serve.start(['sleep', '600'], dict(os.environ))\n"
        "print(child.pid, flush=True); child.wait()"
    )
    command = [sys.executable, "-c", script, str(root / "tools")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child_pid = int(parent.stdout.readline())
    assert alive(child_pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_gone(child_pid)
