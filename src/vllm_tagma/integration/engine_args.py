"""The patches on vLLM's ``EngineArgs``: the flag, the keyword, and the finished configuration.

vLLM builds its configuration in one place for every entry point, ``create_engine_config``, and
decides there about async scheduling, the runner and the platform's worker. So the backend is
chosen after it: two class names and one dict cross the process boundaries, nothing else. A process
without this package then fails on the names instead of serving paged.

The choice travels in ``additional_config``, because ``from_cli_args`` copies only dataclass fields
and runs in API-server children before plugins are loaded there.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_tagma import support, versions
from vllm_tagma.class_names import SCHEDULERS, WORKERS
from vllm_tagma.config import (
    BACKEND_KEY,
    BACKENDS,
    COMPACTIONS,
    DEFAULT_COMPACTION,
    ENVIRONMENT_NAMES,
    MAX_COPY_BUDGET,
    SELF_TESTS,
    TagmaConfig,
    backend_of,
    flag_of,
    with_backend,
    with_option,
)
from vllm_tagma.errors import ConfigError, SeamError
from vllm_tagma.integration import backend_registration
from vllm_tagma.integration.seams import require_seams
from vllm_tagma.integration.transfer import connector_names

_logger = logging.getLogger("vllm.tagma.config")

FLAG = "--kv-cache-backend"

_OPTION_FLAGS = ("compaction", "copy_budget", "copy_bytes", "self_test")
"""Options that have a flag of their own; the others are for finding faults."""

_MARK = "__vllm_tagma__"
_CLASSES = ("EngineArgs", "AsyncEngineArgs")


def apply(arg_utils: ModuleType) -> None:
    """Patch ``EngineArgs`` of the loaded module ``vllm.engine.arg_utils``. Idempotent.

    All replacements are made before the first is installed, so a failure leaves vLLM as it was.

    Raises:
        SeamError: ``EngineArgs`` has no such methods (only an unknown vLLM can cause it).
    """
    replacements: list[tuple[type, str, Any]] = []
    for class_name in _CLASSES:
        owner = getattr(arg_utils, class_name, None)
        if not isinstance(owner, type):
            raise SeamError(f"vLLM has no class {arg_utils.__name__}.{class_name}")
        makers: dict[str, Callable[[Any], Any]] = {"__init__": _keyword_init}
        if class_name == "EngineArgs":  # AsyncEngineArgs inherits or calls these two
            makers["add_cli_args"] = _flag_declaring
            makers["create_engine_config"] = _finalising
        for method, maker in makers.items():
            original = getattr(owner, method, None)
            if not callable(original):
                raise SeamError(f"vLLM has no {class_name}.{method}")
            if not hasattr(original, _MARK):
                replacements.append((owner, method, maker(original)))
    for owner, method, replacement in replacements:
        setattr(owner, method, replacement)


def _marked(function: Any) -> Any:
    setattr(function, _MARK, True)
    return function


def _keyword_init(original: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` that also takes ``kv_cache_backend=``, for ``LLM(kv_cache_backend="tagma")``.

    The keyword becomes an entry of ``additional_config``. Nothing is stored on the instance:
    ``LLM.from_engine_args`` passes ``vars(engine_args)`` back as keywords.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        wanted = kwargs.pop(BACKEND_KEY, None)
        if wanted is not None:
            kwargs["additional_config"] = with_backend(kwargs.get("additional_config"), wanted)
        original(self, *args, **kwargs)

    return _marked(__init__)  # type: ignore[no-any-return]


def _flag_declaring(original: Callable[..., Any]) -> staticmethod[..., Any]:
    """``add_cli_args`` that declares the flags on the same parser."""

    @functools.wraps(original)
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        declare_flags(parser)
        return parser

    return staticmethod(_marked(add_cli_args))


def declare_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags to ``parser`` and fold their values into ``additional_config``.

    The folding happens after all arguments are parsed, so the order of our flags and of
    ``--additional-config`` does not matter. An option that is given twice must be given the same
    value. ``parse_known_args`` is the method that both a parser and its parent (for a sub-command)
    call; it is replaced on this one parser object.
    """
    group = parser.add_argument_group(
        title="vllm-tagma", description="KV-cache blocks held as contiguous ranges."
    )
    group.add_argument(
        FLAG,
        choices=list(BACKENDS),
        default=None,
        help="How a request's KV-cache blocks are held: 'paged' is vLLM's own block table, "
        "'tagma' holds them as few contiguous ranges of block ids. A configuration that tagma "
        "does not serve is refused at start-up. Default: paged.",
    )
    group.add_argument(
        flag_of("compaction"),
        choices=list(COMPACTIONS),
        default=None,
        help="With the tagma backend, which blocks may be moved to make room for ranges: none, "
        "cached blocks that no request holds, or blocks of running requests too. "
        f"Default: {DEFAULT_COMPACTION}.",
    )
    group.add_argument(
        flag_of("copy_budget"),
        type=int,
        default=None,
        metavar="BLOCKS",
        help="With the tagma backend, the most blocks that are moved in one scheduler step, 0 to "
        f"{MAX_COPY_BUDGET}. Default: {TagmaConfig.copy_budget}.",
    )
    group.add_argument(
        flag_of("copy_bytes"),
        default=None,
        metavar="SIZE",
        help="With the tagma backend, the most bytes of KV that are moved in one scheduler step, "
        "such as 512M; auto is what the device copies in a fifth of a step. "
        f"Default: {TagmaConfig.copy_bytes}.",
    )
    group.add_argument(
        flag_of("self_test"),
        choices=list(SELF_TESTS),
        default=None,
        help="With the tagma backend, whether each worker compares its kernels with their "
        "references before it serves, and the slots of the first steps or of all steps. "
        f"Default: {TagmaConfig.self_test}.",
    )
    parse_known_args = parser.parse_known_args

    def parse_and_fold(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse_known_args(*args, **kwargs)
        try:
            _fold(namespace)
        except ConfigError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_and_fold  # type: ignore[method-assign]


def _fold(namespace: argparse.Namespace) -> None:
    """Move the values of our flags into ``namespace.additional_config``.

    Raises:
        ConfigError: a contradiction, a wrong value, or an option's flag without the backend.
    """
    wanted = getattr(namespace, BACKEND_KEY, None)
    if wanted is not None:
        namespace.additional_config = with_backend(
            getattr(namespace, "additional_config", None), wanted
        )
    for key in _OPTION_FLAGS:
        value = getattr(namespace, f"tagma_{key}", None)
        if value is not None:
            namespace.additional_config = with_option(
                getattr(namespace, "additional_config", None), key, value
            )


def _finalising(original: Callable[..., Any]) -> Callable[..., Any]:
    """``create_engine_config`` that refuses or finishes a configuration for tagma.

    A paged configuration passes through untouched, with any vLLM version.
    """

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if backend_of(self.additional_config) == "paged":
            return original(self, *args, **kwargs)
        versions.require_supported_vllm()
        require_seams("config")
        TagmaConfig.from_sources(self.additional_config)
        _declare_environment()
        _export_metrics()
        backend_registration.register()
        return finalise(original(self, *args, **kwargs))

    return _marked(create_engine_config)  # type: ignore[no-any-return]


def finalise(vllm_config: Any) -> Any:
    """Choose scheduler and worker classes in a finished ``VllmConfig``, in place. Idempotent.

    Raises:
        UnsupportedError: the configuration is outside the support matrix.
        ConfigError: an option of the backend cannot be understood.
    """
    support.require_supported(vllm_config)
    _advise_on_connector(vllm_config)
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    chosen = (parallel.worker_cls, bool(vllm_config.use_v2_model_runner))
    parallel.worker_cls = WORKERS.get(chosen, parallel.worker_cls)
    return vllm_config


def _advise_on_connector(vllm_config: Any) -> None:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    text = connector_names.advice(getattr(transfer, "kv_connector", None))
    if text is not None:
        _logger.info("%s", text)


def _export_metrics() -> None:
    """Put our metrics on ``/metrics`` of this front end. Imported late: it imports vLLM."""
    from vllm_tagma.integration import stat_logger

    stat_logger.install()


def _declare_environment() -> None:
    """Make our environment variables known to vLLM.

    It warns about, or with ``--fail-on-environ-validation`` refuses, every ``VLLM_*`` name that
    is not in this dict.
    """
    envs = sys.modules.get("vllm.envs")
    known = getattr(envs, "environment_variables", None)
    if isinstance(known, dict):
        for name in ENVIRONMENT_NAMES:
            known.setdefault(name, functools.partial(os.environ.get, name))
