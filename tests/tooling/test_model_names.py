"""What MODEL=... may be, and what a wrong one is told; the hub is a local HTTP server."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import default_model
import models
from progress import SetupFailure


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has the model good/model and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            found = self.path == "/good/model/resolve/main/config.json"
            self.send_response(200 if found else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("text", ["", default_model.NAME])
def test_no_name_is_the_default_model(text, tmp_path):
    model = models.resolve(text=text, root=tmp_path)
    assert model.is_default
    assert model.source == str(tmp_path / ".model" / default_model.NAME)


@pytest.mark.parametrize("text", ["/no/such/folder", "./model", "~/model", "a/b/c", "a b", "-x"])
def test_neither_folder_nor_hub_id(text, tmp_path):
    with pytest.raises(SetupFailure, match=r"neither a folder that exists .* nor a model hub id"):
        models.resolve(text=text, root=tmp_path)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(SetupFailure, match=r"without a config\.json"):
        models.resolve(text=str(tmp_path), root=tmp_path)


def test_folder_with_a_base_model_has_no_chat(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    model = models.resolve(text=str(tmp_path), root=tmp_path)
    assert (model.name, model.weight_bytes, model.has_chat) == (tmp_path.name, 1000, False)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert models.resolve(text=str(tmp_path), root=tmp_path).has_chat


def test_hub_id_that_exists(hub, tmp_path):
    assert models.resolve(text="good/model", root=tmp_path).source == "good/model"


def test_hub_id_that_does_not_exist(hub, tmp_path):
    with pytest.raises(SetupFailure, match=r"MODEL=bad/model .* no such model .*HTTP 404"):
        models.resolve(text="bad/model", root=tmp_path)


def test_hub_that_is_not_reached(hub, monkeypatch, tmp_path):
    hub.server_close()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SetupFailure, match=r"could not be asked for it.*Check the network"):
        models.resolve(text="good/model", root=tmp_path)


def test_hub_is_not_asked_for_a_cached_model(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert models.resolve(text="some/model", root=tmp_path).name == "some/model"
