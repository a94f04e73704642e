"""Our connectors in vLLM's factory, what they refuse, and the figures that they keep."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector, NixlPushConnector

from vllm_tagma import plugin
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.integration.transfer import connector_names
from vllm_tagma.integration.transfer.nixl_connectors import (
    TagmaNixlConnector,
    TagmaNixlPushConnector,
)
from vllm_tagma.integration.transfer.run_agent import UNMERGED_REASONS
from vllm_tagma.support.connector_rules import CONNECTOR_RULES


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(TagmaNixlConnector, NixlConnector), (TagmaNixlPushConnector, NixlPushConnector)],
)
def test_the_name_is_all_that_a_configuration_needs(ours, stock):
    for _ in range(2):
        plugin.register()  # vLLM calls it in every process, sometimes twice
    config = KVTransferConfig(kv_connector=ours.__name__, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is ours
    by_path = KVTransferConfig(
        kv_connector=ours.__name__,
        kv_role="kv_both",
        kv_connector_module_path=connector_names.MODULE,
    )
    assert KVConnectorFactory.get_connector_class(by_path) is ours
    assert issubclass(ours, stock)
    assert supports_hma(ours) == supports_hma(stock)


def test_a_factory_of_another_form_is_left_alone():
    connector_names.make_known(SimpleNamespace())
    connector_names.make_known(SimpleNamespace(KVConnectorFactory=SimpleNamespace(names=[])))


def test_advice_is_for_those_who_name_a_stock_connector():
    assert "kv_connector TagmaNixlConnector" in connector_names.advice("NixlConnector")
    assert "kv_connector TagmaNixlPushConnector" in connector_names.advice("NixlPushConnector")
    for name in (*connector_names.CONNECTORS, "OffloadingConnector", None):
        assert connector_names.advice(name) is None


@pytest.mark.parametrize("module", [None, connector_names.MODULE])
def test_the_tagma_backend_serves_the_pull_connector_however_it_is_named(module):
    rules = {rule.id: rule for rule in CONNECTOR_RULES}

    def finding(rule, name):
        transfer = KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_module_path=module
        )
        cache = SimpleNamespace(kv_offloading_size=None)
        return rules[rule].in_config(
            SimpleNamespace(kv_transfer_config=transfer, cache_config=cache)
        )

    for rule in ("kv-transfer", "kv-push"):
        assert finding(rule, "TagmaNixlConnector") is None
    assert finding("kv-push", "TagmaNixlPushConnector") == "TagmaNixlPushConnector"
    assert finding("kv-transfer", "TagmaNixlPushConnector") is None, "one rule speaks"


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("model_config", "enable_return_routed_experts", True),
    ],
)
def test_what_vllm_checks_by_name_is_refused_under_another(part, option, value):
    config = SimpleNamespace(**{part: SimpleNamespace(**{option: value})})
    with pytest.raises(UnsupportedError, match=f"does not serve {option}={value}"):
        TagmaNixlConnector(config, KVConnectorRole.SCHEDULER, None)


def recorded():
    stats = TagmaNixlConnector.build_kv_connector_stats()
    stats.record_runs(blocks=40, runs=2, descriptors=60, num_bytes=1 << 20)
    stats.record_runs(blocks=10, runs=1, descriptors=30, num_bytes=1 << 18)
    stats.record_unmerged(reason="layout", descriptors=77)
    stats.record_preparation(0.25)
    return stats


def test_figures_survive_the_way_to_the_front_end():
    worker = recorded()
    assert not worker.is_empty()
    taken = pickle.loads(pickle.dumps(worker.clone_and_reset()))
    assert worker.is_empty()
    received = TagmaNixlConnector.build_kv_connector_stats(taken.to_dict())
    total = received.aggregate(recorded())
    assert sum(total.data["run_blocks"]) == 100
    line = total.reduce()
    assert line["Avg number of runs"] == 1.5
    assert line["Avg number of blocks"] == 25
    assert line["Num unmerged transfers"] == 2


def test_figures_become_metrics_beside_those_of_vllm():
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = TagmaNixlConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {0: ["m", "0"]}
    )
    metrics.observe(recorded().to_dict())
    labels = {"model_name": "m", "engine": "0"}

    def value(name, **more):
        return registry.get_sample_value(f"vllm:{name}", {**labels, **more})

    assert value("tagma_transfer_merged_total") == 2
    assert value("tagma_transfer_blocks_total") == 50
    assert value("tagma_transfer_runs_total") == 3
    assert value("tagma_transfer_descriptors_total") == 90
    assert value("tagma_transfer_bytes_total") == (1 << 20) + (1 << 18)
    assert value("tagma_transfer_preparation_seconds_total") == 0.25
    for reason in UNMERGED_REASONS:
        expected = 1 if reason == "layout" else 0
        assert value("tagma_transfer_unmerged_total", reason=reason) == expected
    assert value("nixl_num_descriptors_count") == 0, "vLLM's own are there too"
