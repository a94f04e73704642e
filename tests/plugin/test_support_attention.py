"""Attention over ranges is off by default, and refused by name where it is not covered."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from vllm_tagma import attention_backend, support
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.support.config_probes import attribute

if TYPE_CHECKING:
    from conftest import ConfigFactory

CUSTOM = SimpleNamespace(name="CUSTOM")

# Rule, attribute of a configuration, its value, and what the refusal says of it.
ASKED = [
    ("runner", "use_v2_model_runner", False, "CUSTOM with Model Runner V1"),
    ("kv-dtype", "cache_config.cache_dtype", "fp8", "CUSTOM with --kv-cache-dtype fp8"),
    ("head-size", "model_config.get_head_size", lambda: 16, "CUSTOM with heads of 16"),
    ("mla", "model_config.use_mla", True, "CUSTOM with MLA"),
    ("windows", "cache_config.sliding_window", 64, "CUSTOM with a sliding window of 64 tokens"),
    (
        "speculation",
        "speculative_config",
        SimpleNamespace(method="eagle"),
        "CUSTOM with --speculative-config eagle",
    ),
    (
        "connector",
        "kv_transfer_config",
        SimpleNamespace(kv_connector="NixlConnector"),
        "CUSTOM with --kv-transfer-config NixlConnector",
    ),
]
SHOWN = {f"range-attention-{name}" for name, *_ in ASKED} | {
    "range-attention-plugin",
    "range-attention-per-kind",
}


def _config(path: str = "", value: Any = None, *, backend: Any = CUSTOM) -> Any:
    """What the rules read of a configuration that they admit, with one attribute changed."""
    config = SimpleNamespace(
        use_v2_model_runner=True,
        attention_config=SimpleNamespace(backend=backend, backend_per_kind={}),
        cache_config=SimpleNamespace(cache_dtype="auto", sliding_window=None),
        model_config=SimpleNamespace(
            use_mla=False,
            get_head_size=lambda: 64,
            hf_text_config=SimpleNamespace(sliding_window=64),
        ),
        speculative_config=None,
        kv_transfer_config=None,
    )
    if path:
        owner, _, name = path.rpartition(".")
        setattr(attribute(config, owner) if owner else config, name, value)
    return config


def _refused(config: Any) -> dict[str, str]:
    found = {f.rule.id: f.message for f in support.explain(config)}
    return {name: said for name, said in found.items() if name.startswith("range-attention")}


@pytest.mark.parametrize(("name", "path", "value", "says"), ASKED)
def test_what_it_does_not_cover_is_refused_by_name(
    vllm_config: ConfigFactory, name: str, path: str, value: Any, says: str
) -> None:
    owner, _, last = path.rpartition(".")
    real = vllm_config()
    assert hasattr(attribute(real, owner) if owner else real, last), f"vLLM has no {path}"
    assert _refused(_config()) == {}
    refused = _refused(_config(path, value))
    assert refused.keys() == {f"range-attention-{name}"}
    (message,) = refused.values()
    assert f"--attention-backend is {says}." in message
    assert "drop --attention-backend, or use --kv-cache-backend paged." in message
    assert _refused(_config(path, value, backend=None)) == {}


def test_for_some_kinds_of_layers_it_is_refused(vllm_config: ConfigFactory) -> None:
    assert hasattr(vllm_config().attention_config, "backend_per_kind")
    kinds = {"full_attention": CUSTOM, "mla_attention": SimpleNamespace(name="TRITON_MLA")}
    config = _config("attention_config.backend_per_kind", kinds, backend=None)
    (message,) = _refused(config).values()
    assert "backend_per_kind is CUSTOM for full_attention." in message


def test_on_a_cpu_it_is_refused_at_start_up(engine_args: ConfigFactory) -> None:
    """vLLM would take its CPU attention instead, and only log it."""
    arguments = engine_args(
        attention_backend="CUSTOM", additional_config={"kv_cache_backend": "tagma"}
    )
    with pytest.raises(UnsupportedError, match="CUSTOM with Model Runner V1"):
        arguments.create_engine_config()


_REGISTRATION = """
import json, sys
from vllm.v1.attention.backends import registry
from vllm_tagma import plugin
from vllm_tagma.integration import backend_registration
custom = registry.AttentionBackendEnum.CUSTOM
plugin.register()
seen = [custom.is_overridden()]
if sys.argv[1] == "other":
    registry.register_backend(custom, "my.plugin.Backend")
backend_registration.register()
backend_registration.register()
seen.append(custom.get_path())
if sys.argv[1] == "ours":
    seen.append(custom.get_class().get_name())
json.dump(seen, sys.stdout)
"""


@pytest.mark.parametrize(
    ("case", "seen"),
    [
        ("ours", [False, attention_backend.CLASS, "CUSTOM"]),
        ("other", [False, "my.plugin.Backend"]),
    ],
)
def test_custom_is_ours_where_tagma_is_served_and_it_is_free(case: str, seen: list[Any]) -> None:
    """Loading the plugin leaves it alone: who serves paged may use another plugin's."""
    run = subprocess.run(
        [sys.executable, "-c", _REGISTRATION, case], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == seen


def test_where_another_plugin_has_custom_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    custom = SimpleNamespace(is_overridden=lambda: True, get_path=lambda: "my.plugin.Backend")
    registry = SimpleNamespace(AttentionBackendEnum=SimpleNamespace(CUSTOM=custom))
    monkeypatch.setitem(sys.modules, attention_backend.REGISTRY, registry)
    (message,) = _refused(_config()).values()
    assert "CUSTOM with the class my.plugin.Backend" in message
    assert _refused(_config(backend=None)) == {}
