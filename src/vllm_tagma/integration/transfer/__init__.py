"""vLLM's NIXL connectors with transfers posted as runs: ``docs/kv-transfer.md``.

``run_agent.py`` stands between vLLM's worker and NIXL and merges, ``nixl_connectors.py`` derives
the connectors, ``transfer_stats.py`` counts, ``connector_names.py`` makes them known by name.
"""
