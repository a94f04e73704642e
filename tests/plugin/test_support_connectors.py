"""KV connectors in the support matrix: served or refused by name, wherever a name is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import KVTransferConfig

from vllm_tagma import support

if TYPE_CHECKING:
    from conftest import ConfigFactory

TAGMA = {"additional_config": {"kv_cache_backend": "tagma"}}


def _transfer(name: str, module: str | None = None, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        kv_connector_module_path=module,
        kv_connector_extra_config=extra,
    )


def _multi(*connectors: dict[str, str]) -> KVTransferConfig:
    return _transfer("MultiConnector", connectors=list(connectors))


@pytest.mark.parametrize(
    "transfer",
    [
        _transfer("ExampleConnector"),
        _multi(
            {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        ),
    ],
    ids=["one", "several"],
)
def test_connectors_that_are_served_pass_both_gates(
    vllm_config: ConfigFactory, transfer: KVTransferConfig
) -> None:
    support.require_supported(vllm_config(kv_transfer_config=transfer, **TAGMA))


@pytest.mark.parametrize(
    ("transfer", "rule_id", "value"),
    [
        (_transfer("Mine", "my.connectors"), "kv-transfer", "is Mine of my.connectors"),
        (_transfer("NixlConnector", "my.copy"), "kv-transfer", "is NixlConnector of my.copy"),
        (
            _multi(
                {"kv_connector": "NixlConnector"},
                {"kv_connector": "HF3FSKVConnector"},
                {"kv_connector": "Mine", "kv_connector_module_path": "my.connectors"},
            ),
            "kv-transfer",
            "is HF3FSKVConnector, Mine of my.connectors",
        ),
        (
            _multi({"kv_connector": "OffloadingConnector"}),
            "kv-offloading-connector",
            "is OffloadingConnector",
        ),
    ],
)
def test_connectors_are_refused_by_name_wherever_they_are_named(
    vllm_config: ConfigFactory, transfer: KVTransferConfig, rule_id: str, value: str
) -> None:
    config = vllm_config()
    config.kv_transfer_config = transfer
    (finding,) = support.explain(config)
    assert finding.rule.id == rule_id
    assert value in finding.message


def test_a_connector_of_this_package_is_served_by_its_name(vllm_config: ConfigFactory) -> None:
    config = vllm_config()
    for module in (None, "vllm_tagma.integration.transfer.nixl_connectors"):
        config.kv_transfer_config = _transfer("TagmaNixlConnector", module)
        assert support.explain(config) == []
    config.kv_transfer_config = _transfer("TagmaNixlPushConnector", "vllm_tagma.any")
    (finding,) = support.explain(config)
    assert finding.rule.id == "kv-push"


def test_model_runner_v2_is_refused_with_a_connector(
    vllm_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = {"kv_cache_backend": "tagma", "tagma": {"v2_interpreter": True}}
    config = vllm_config(additional_config=options)
    config.kv_transfer_config = _transfer("NixlConnector")
    assert support.explain(config) == []

    class OnV2:
        use_v2_model_runner = True

        def __getattr__(self, name: str) -> Any:
            return getattr(config, name)

    (finding,) = support.explain(OnV2())
    assert finding.rule.id == "kv-connector-gpu"
