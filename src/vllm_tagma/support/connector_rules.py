"""Rules of the support matrix about KV connectors, by the connector's name.

A connector is served when a test runs it on this backend; any other is refused by its name, with
what stands in the way. ``MultiConnector`` is served if all that it joins are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from vllm_tagma.class_names import GPU_WORKER, WORKERS
from vllm_tagma.support.config_probes import attribute, unless
from vllm_tagma.support.rule import Find, Rule

_OURS: Final = "vllm_tagma."

SERVED_CONNECTORS: Final = frozenset(
    {
        "ExampleConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "TagmaNixlConnector",
    }
)
"""By the name that ``--kv-transfer-config`` gives them: of vLLM's own, and ours."""

_OFFLOADING: Final = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
_LMCACHE: Final = frozenset({"LMCacheConnectorV1", "LMCacheMPConnector"})
_MOONCAKE: Final = frozenset({"MooncakeConnector", "MooncakeStoreConnector"})
_PUSH: Final = frozenset({"NixlPushConnector", "TagmaNixlPushConnector"})
_NAMED: Final = SERVED_CONNECTORS | _OFFLOADING | _LMCACHE | _MOONCAKE | _PUSH
_OPTION: Final = "--kv-transfer-config"
_SERVED_NAMES: Final = ", ".join(sorted(SERVED_CONNECTORS))


def _connectors(config: Any) -> Iterator[tuple[str, str | None]]:
    """Name and module of the connector, and of those that a ``MultiConnector`` joins."""
    if attribute(config, "cache_config.kv_offloading_size") is not None:
        return  # vLLM derives the connector from it; that rule speaks
    transfer = attribute(config, "kv_transfer_config")
    name = getattr(transfer, "kv_connector", None)
    if name is None:
        return
    yield str(name), getattr(transfer, "kv_connector_module_path", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    for child in extra.get("connectors", ()) if name == "MultiConnector" else ():
        yield str(child.get("kv_connector")), child.get("kv_connector_module_path")


def _is_ours(module: str | None) -> bool:
    return module is not None and module.startswith(_OURS)


def _named(names: frozenset[str]) -> Find:
    """Finds connectors of vLLM's by name."""

    def find(config: Any) -> str | None:
        found = [name for name, module in _connectors(config) if name in names and not module]
        return ", ".join(found) or None

    return find


def _push(config: Any) -> str | None:
    found = [
        name
        for name, module in _connectors(config)
        if name in _PUSH and (module is None or _is_ours(module))
    ]
    return ", ".join(found) or None


def _unknown(config: Any) -> str | None:
    found = []
    for name, module in _connectors(config):
        if module is None and name not in _NAMED:
            found.append(name)
        elif module is not None and not _is_ours(module):
            found.append(f"{name} of {module}")
        elif module is not None and name not in SERVED_CONNECTORS | _PUSH:
            found.append(name)
    return ", ".join(found) or None


def _on_a_gpu_or_v2(config: Any) -> str | None:
    worker = attribute(config, "parallel_config.worker_cls")
    gpu = {GPU_WORKER} | {name for (stock, _), name in WORKERS.items() if stock == GPU_WORKER}
    if worker not in gpu and not attribute(config, "use_v2_model_runner"):
        return None
    return ", ".join(name for name, _ in _connectors(config)) or None


CONNECTOR_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="kv-connectors",
        title=f"KV connectors on the CPU backend: {_SERVED_NAMES}",
        option=_OPTION,
        status="served",
        why="blocks that a transfer reads or writes are pinned from its start to its end",
        proof=(
            "tests/e2e/test_connector_same_tokens.py::test_tokens_and_kv_are_identical",
            "tests/e2e/test_disaggregation.py::test_tokens_are_those_of_a_single_stock_server",
            "tests/manager/differential/test_connector_traces.py::test_trace",
        ),
    ),
    Rule(
        id="kv-offloading",
        title="KV-cache offloading",
        option="--kv-offloading-size",
        status="planned",
        why="vLLM's workers for it copy between a CUDA or XPU device and host memory; "
        "on the CPU backend they do not start",
        way_out="drop --kv-offloading-size",
        in_config=unless("cache_config.kv_offloading_size"),
    ),
    Rule(
        id="kv-offloading-connector",
        title="offloading connectors",
        option=_OPTION,
        status="planned",
        why="Their workers copy between a CUDA or XPU device and host memory; on the CPU backend "
        "they do not start",
        way_out=f"drop {_OPTION}",
        in_config=_named(_OFFLOADING),
    ),
    Rule(
        id="lmcache",
        title="LMCache connectors",
        option=_OPTION,
        status="planned",
        why="LMCache 0.5.6 has connectors for CUDA, XPU, HPU and MUSA memory and none for a CPU's: "
        "its engine starts, finds none and lets vLLM compute everything",
        way_out=f"drop {_OPTION}",
        in_config=_named(_LMCACHE),
    ),
    Rule(
        id="mooncake",
        title="Mooncake connectors",
        option=_OPTION,
        status="planned",
        why="vLLM's connectors for it ask torch for an accelerator when they start "
        "(MooncakeConnector) or save (MooncakeStoreConnector): on a CPU they end with an error",
        way_out=f"drop {_OPTION}",
        in_config=_named(_MOONCAKE),
    ),
    Rule(
        id="kv-push",
        title="NIXL connectors that push",
        option=_OPTION,
        status="planned",
        why="In trials between a stock server and ours every token was right, partial prefix hits "
        "included; requests that are aborted, preempted or fail to be pushed are not tested yet",
        way_out="choose TagmaNixlConnector, which pulls, on both sides",
        in_config=_push,
    ),
    Rule(
        id="kv-transfer",
        title="other KV connectors",
        option=_OPTION,
        status="planned",
        why=f"Served are {_SERVED_NAMES}; a connector that keeps block ids in another way "
        "could read blocks that have moved",
        way_out=f"choose one of these or drop {_OPTION}",
        in_config=_unknown,
    ),
    Rule(
        id="kv-connector-gpu",
        title="KV connectors on a GPU and on Model Runner V2",
        option=_OPTION,
        status="planned",
        why="Copies of moved blocks run on the GPU's stream, which a transfer does not wait for; "
        "V2 under the Triton interpreter was not tested",
        way_out=f"drop {_OPTION}",
        in_config=_on_a_gpu_or_v2,
    ),
)
