"""Our connectors by name: ``--kv-transfer-config '{"kv_connector": "TagmaNixlConnector", ...}'``.

vLLM's factory keeps module and class name and imports them when a configuration asks for one, so
making the names known costs nothing where nobody does.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory"

MODULE: Final = "vllm_tagma.integration.transfer.nixl_connectors"

STOCK_TO_OURS: Final = {
    "NixlConnector": "TagmaNixlConnector",
    "NixlPullConnector": "TagmaNixlConnector",
    "NixlPushConnector": "TagmaNixlPushConnector",
}
CONNECTORS: Final = tuple(dict.fromkeys(STOCK_TO_OURS.values()))


def make_known(factory_module: ModuleType) -> None:
    """Register the names with the ``KVConnectorFactory`` of a loaded module. Idempotent.

    A vLLM whose factory is another one is left alone: who asks for one of our connectors there is
    told by it that there is no such name.
    """
    factory = getattr(factory_module, "KVConnectorFactory", None)
    known = getattr(factory, "_registry", None)
    if factory is None or not isinstance(known, dict):
        return
    for name in CONNECTORS:
        if name not in known:
            factory.register_connector(name, MODULE, name)


def advice(connector: str | None) -> str | None:
    """What helps whoever names a connector of vLLM's for which there is one of ours."""
    ours = STOCK_TO_OURS.get(connector or "")
    if ours is None:
        return None
    return (
        f"kv_connector {connector} names every block of a transfer. {ours}, which speaks the same "
        f"protocol, names runs of blocks: --kv-transfer-config.kv_connector {ours}"
    )
