"""The seams of the NIXL connectors. How to read an entry: ``seam.py``.

vLLM 0.33 prepares its descriptors in strided form; ``DescriptorSpace`` reads both.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.integration.seams.seam import Seam

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
_BASE = f"{_NIXL}.base_worker:NixlBaseConnectorWorker"
_STATS = f"{_NIXL}.stats"
_MERGED = "vLLM's NIXL worker posts runs of blocks"
_PUBLIC = "never: vLLM made it for connectors from outside"
_COMPUTE_CALL = (
    "(block_ids=, dst_num_blocks=, block_size_ratio=, physical_blocks_per_logical=, "
    "region_num_blocks=, region_group_ids=, uses_region_group_mapping=)"
)
_BASE_READS = (
    "add_remote_agent, check_remote_metadata, check_xfer_state, {first}deregister_memory, "
    "get_agent_metadata, get_reg_descs, {second}get_xfer_telemetry, prep_xfer_dlist, "
    "register_memory, release_dlist_handle, release_xfer_handle, remove_remote_agent, send_notif"
)

TRANSFER_SEAMS: Final[tuple[Seam, ...]] = (
    Seam(
        target=f"{_FACTORY}.register_connector",
        kind="contract",
        room="transfer",
        why="makes our connectors known by name (connector_names.py)",
        expected="@classmethod (cls, name, module_path, class_name) -> None",
        remove_when=_PUBLIC,
    ),
    Seam(
        target=f"{_FACTORY}._registry",
        kind="contract",
        room="transfer",
        why="registering a name twice is an error, and plugins are loaded more than once",
        expected="dict[str, Callable[[], type[KVConnectorBase]]] = {}",
        remove_when="vLLM's factory can be asked for a name",
    ),
    Seam(
        target=f"{_NIXL}.connector:NixlBaseConnector.__init__",
        kind="subclass",
        room="transfer",
        why="our connectors begin with it and set scheduler and worker, as its text asks for "
        "(nixl_connectors.py)",
        expected="(self, vllm_config, role, kv_cache_config)",
        remove_when=_PUBLIC,
    ),
    *(
        Seam(
            target=f"{_NIXL}.connector:Nixl{mode}Connector.__init__",
            callee=f"Nixl{mode}Connector{part}",
            kind="contract",
            room="transfer",
            why="our connectors build scheduler and worker the same way",
            expected="(*3)",
            remove_when="vLLM's NIXL connectors name their worker class",
        )
        for mode in ("Pull", "Push")
        for part in ("Scheduler", "Worker")
    ),
    Seam(
        target=f"{_BASE}._compute_desc_ids",
        kind="subclass",
        room="transfer",
        why="our workers name blocks instead of descriptors here",
        expected="(self, block_ids, dst_num_blocks, block_size_ratio, physical_blocks_per_logical, "
        "region_num_blocks=None, region_group_ids=None, uses_region_group_mapping=None) "
        "-> np.ndarray",
        remove_when=_MERGED,
    ),
    *(
        Seam(
            target=f"{_NIXL}.{module}:{method}",
            callee=callee,
            kind="contract",
            room="transfer",
            why="what is computed above must reach NIXL through RunAgent (run_agent.py)",
            expected=expected,
            remove_when=_MERGED,
        )
        for module, method, callee, expected in (
            (
                "pull_worker",
                "NixlPullConnectorWorker._read_blocks",
                "self._compute_desc_ids",
                _COMPUTE_CALL,
            ),
            (
                "pull_worker",
                "NixlPullConnectorWorker._read_blocks",
                "self.nixl_wrapper.make_prepped_xfer",
                "(*5, notif_msg=)",
            ),
            (
                "push_worker",
                "NixlPushConnectorWorker._xfer_blocks",
                "self._compute_desc_ids",
                _COMPUTE_CALL,
            ),
            (
                "push_worker",
                "NixlPushConnectorWorker._xfer_blocks",
                "self.nixl_wrapper.make_prepped_xfer",
                "(*5, notif_msg=)",
            ),
        )
    ),
    Seam(
        target=f"{_NIXL}.base_worker",
        owner="self.nixl_wrapper",
        kind="contract",
        room="transfer",
        why="RunAgent stands in for the agent: whatever handles prepared lists must be known to it",
        expected=_BASE_READS.format(first="", second="get_xfer_descs, "),
        changed={"0.33": _BASE_READS.format(first="create_backend, ", second="")},
        remove_when=_MERGED,
    ),
    *(
        Seam(
            target=f"{_NIXL}.{module}",
            owner="self.nixl_wrapper",
            kind="contract",
            room="transfer",
            why="the same",
            expected=expected,
            remove_when=_MERGED,
        )
        for module, expected in (
            ("pull_worker", "get_new_notifs, make_prepped_xfer, send_notif, transfer"),
            (
                "push_worker",
                "get_new_notifs, make_prepped_xfer, release_xfer_handle, send_notif, transfer",
            ),
        )
    ),
    *(
        Seam(
            target=f"{_BASE}.{method}",
            callee="self.nixl_wrapper.prep_xfer_dlist",
            kind="contract",
            room="transfer",
            why="RunAgent reads the list that is prepared here",
            expected="(*2)",
            changed={"0.33": "(*2, mem_type=)"},
            remove_when=_MERGED,
        )
        for method in ("register_local_xfer_handler", "add_remote_agent")
    ),
    Seam(
        target=f"{_BASE}.__init__",
        callee="NixlKVConnectorStats",
        kind="contract",
        room="transfer",
        why="our workers replace these statistics with their own (transfer_stats.py)",
        expected="()",
        remove_when="vLLM's NIXL workers name the class of their statistics",
    ),
    Seam(
        target=f"{_BASE}.get_kv_connector_stats",
        callee="self.xfer_stats.clone_and_reset",
        kind="contract",
        room="transfer",
        why="where they are taken from",
        expected="()",
        remove_when="vLLM's NIXL workers name the class of their statistics",
    ),
    *(
        Seam(
            target=f"{_STATS}:{method}",
            kind="subclass",
            room="transfer",
            why="RunStats and RunPromMetrics extend it",
            expected=expected,
            remove_when=_PUBLIC,
        )
        for method, expected in (
            ("NixlKVConnectorStats.reset", "(self)"),
            ("NixlKVConnectorStats.clone_and_reset", "(self) -> 'NixlKVConnectorStats'"),
            ("NixlKVConnectorStats.is_empty", "(self) -> bool"),
            ("NixlKVConnectorStats.reduce", "(self) -> dict[str, int | float]"),
            (
                "NixlPromMetrics.__init__",
                "(self, vllm_config, metric_types, labelnames, per_engine_labelvalues)",
            ),
            ("NixlPromMetrics.observe", "(self, transfer_stats_data, engine_idx=0)"),
        )
    ),
)
