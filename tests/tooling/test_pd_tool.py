"""`make pd`: what it refuses before anything is built, and the commands that it would run."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys

import pytest

import pd
from models import Model
from progress import SetupFailure


def options(**changes):
    given = {
        "host": "127.0.0.1",
        "port": "18950",
        "connector": "TagmaNixlConnector",
        "args": "",
        "prefill_args": "",
        "decode_args": "",
    }
    return argparse.Namespace(**{**given, **changes})


def five_free_ports():
    for port in range(20_000, 60_000, 7):
        probes = [socket.socket() for _ in pd.PORT_USES]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", port + offset))
            return port
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no five ports in a row are free")


def test_a_taken_port_is_named_with_its_use_before_anything_is_built(root):
    port = five_free_ports()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port + 3))
        listener.listen()
        result = subprocess.run(
            ["make", "--no-print-directory", "pd", f"PYTHON={sys.executable}", f"PORT={port}"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode != 0
    assert f"Port {port + 3}, for the prefill server's NIXL side channel" in result.stderr
    assert "[1/" not in result.stdout


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"port": "eighty"}, "PORT=eighty is not a port"),
        ({"port": "65533"}, "the next four are used"),
        ({"args": "--kv-transfer-config '{}'"}, "--kv-transfer-config, which make pd sets"),
        ({"decode_args": "--kv-transfer-config.kv_role kv_both"}, "which make pd sets"),
        ({"prefill_args": "--port 1"}, "give it as PORT="),
    ],
)
def test_what_cannot_be_taken(changes, says):
    with pytest.raises(SetupFailure, match=says):
        pd.plan(options(**changes))


def test_two_servers_with_roles_ports_and_cores_of_their_own():
    port = five_free_ports()
    prefill, decode = pd.plan(
        options(port=str(port), args="--seed 1", decode_args="--max-num-seqs 4")
    )
    sides = (prefill, decode)
    ports = {port, *(s.port for s in sides), *(s.side_channel_port for s in sides)}
    assert ports == set(range(port, port + 5))
    command = pd.server_command(
        decode,
        vllm="vllm",
        model=Model("m", "m"),
        connector="TagmaNixlConnector",
        kv_bytes=1 << 30,
        dtype="float32",
    )
    assert command[-4:] == ["--seed", "1", "--max-num-seqs", "4"]
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer == {"kv_connector": "TagmaNixlConnector", "kv_role": "kv_consumer"}
    assert prefill.role == "kv_producer"
    assert "--max-num-seqs" not in prefill.extra


def test_cores_are_halved():
    assert pd.split_cores([0, 1, 2, 3, 4]) == ([0, 1], [2, 3, 4])
    assert pd.split_cores([7]) == ([7], [7])


def test_what_the_user_has_set_is_left_alone(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    side = pd.Side("prefill", "kv_producer", 1, 2, [3, 4], [])
    assert pd.server_environment(side) == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "2",
        "UCX_TLS": "tcp,self,sm",
    }


def test_the_end_of_one_is_the_end_of_all(capsys):
    lasting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ending = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    try:
        assert pd.first_end(("one", "other"), (lasting, ending)) == 1
    finally:
        lasting.kill()
        lasting.wait()
    assert "the other ended with status 3" in capsys.readouterr().err
