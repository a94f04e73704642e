"""``register()``: the function vLLM calls in every process that loads general plugins.

It wires the backend's flag and its finalisation step into ``EngineArgs``, makes the names of our
KV-transfer connectors known, and does nothing else.
It never imports vLLM: where ``vllm.engine.arg_utils`` is loaded it patches it, otherwise it waits
for that module with an import hook (``integration/import_hook.py``). That keeps
``import vllm_tagma`` and ``tagma --help`` fast, and works without vLLM installed.

Whoever installs the plugin and serves paged must not notice it, whatever vLLM they have; whoever
asks for tagma must get it or an error. So an unknown vLLM version is no error here, but in the
patched ``create_engine_config``, when tagma is asked for.
"""

from __future__ import annotations

import logging
from types import ModuleType

from vllm_tagma.errors import SeamError

# Under vLLM's logger: its handlers and level apply, a logger of our own would stay silent.
_logger = logging.getLogger("vllm.tagma.plugin")

ARG_UTILS = "vllm.engine.arg_utils"


def register() -> None:
    """Wire ``EngineArgs`` now, or as soon as vLLM imports it. Idempotent and re-entrant."""
    from vllm_tagma.integration.import_hook import when_imported
    from vllm_tagma.integration.transfer import connector_names

    when_imported(ARG_UTILS, _wire)
    when_imported(connector_names.FACTORY, connector_names.make_known)


def _wire(arg_utils: ModuleType) -> None:
    from vllm_tagma.integration import engine_args

    try:
        engine_args.apply(arg_utils)
    except SeamError as error:
        # Nothing of EngineArgs was changed, so paged serving is untouched, and the flag does not
        # exist, so asking for tagma by it is an error. Raising would stop paged serving too.
        _logger.error("--kv-cache-backend is not available: %s", error)
