"""The options of the backend, read strictly from vLLM's ``additional_config`` and the environment.

vLLM carries ``additional_config`` into every process and into the key of its compile cache, and
ignores what it does not know. So the reading is strict here: an unknown key, a wrong type or an
unreadable environment value stops start-up with the choices named.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from vllm_tagma.copy_budget import AUTO, bytes_of
from vllm_tagma.errors import ConfigError

Backend = Literal["paged", "tagma"]
Compaction = Literal["off", "idle", "live"]

SelfTest = Literal["off", "start", "always"]

BACKEND_KEY: Final = "kv_cache_backend"
"""Key of ``additional_config`` that chooses the backend."""

OPTIONS_KEY: Final = "tagma"
"""Key of ``additional_config`` under which the options below are given."""

BACKENDS: Final[tuple[Backend, ...]] = ("paged", "tagma")

COMPACTIONS: Final[tuple[Compaction, ...]] = get_args(Compaction)

SELF_TESTS: Final[tuple[SelfTest, ...]] = get_args(SelfTest)

DEFAULT_COMPACTION: Final[Compaction] = "live"

MAX_POOL_MAP_PARTS: Final = 256
"""Each part is two time series on ``/metrics``."""

MAX_TEST_STEPS: Final = 1_000_000

MAX_COPY_BUDGET: Final = 65_536
"""Blocks a step. Larger values are a slip: a budget in bytes or tokens, or one for a whole run."""

_ENVIRONMENT: Final = {
    "compaction": "VLLM_TAGMA_COMPACTION",
    "copy_budget": "VLLM_TAGMA_COPY_BUDGET",
    "debug_slots": "VLLM_TAGMA_DEBUG_SLOTS",
    "check_invariants": "VLLM_TAGMA_CHECK_INVARIANTS",
}
_ENVIRONMENT_PREFIX: Final = "VLLM_TAGMA_"

ENVIRONMENT_NAMES: Final[tuple[str, ...]] = tuple(_ENVIRONMENT.values())
"""The environment variables that this package reads."""


@dataclass(frozen=True, kw_only=True)
class TagmaConfig:
    """Options of the tagma backend, as given under ``additional_config["tagma"]``.

    Example::

        vllm serve MODEL --kv-cache-backend tagma --additional-config.tagma.debug_slots true
        LLM(MODEL, additional_config={"kv_cache_backend": "tagma", "tagma": {"debug_slots": True}})
    """

    alignment: int = 1
    """Alignment contract of ranges.

    What: starts and lengths of ranges are multiples of this.
    Unit and default: blocks, 1 (no constraint).
    When to change: not yet. The core keeps the contract, but serving refuses any value but 1
    until a kernel profits from it.
    Example: ``--additional-config.tagma.alignment 1``
    """

    compaction: Compaction = DEFAULT_COMPACTION
    """Which blocks the scheduler may move to make room for ranges.

    What: ``off`` moves nothing; ``idle`` moves cached blocks that no request holds; ``live`` moves
    blocks of running requests too. Moved KV is copied by the worker before the step that reads it.
    Unit and default: a choice, ``live``. Environment: ``VLLM_TAGMA_COMPACTION`` (wins when set).
    When to change: ``off`` to rule copies out when looking for a fault, ``idle`` where the blocks
    of running requests must stay where they are. ``docs/compaction.md`` has what each costs.
    Example: ``--tagma-compaction live`` or ``--additional-config.tagma.compaction live``.
    In a YAML file of ``--config`` quote ``"off"``: a bare ``off`` is false, which vLLM drops.
    """

    copy_budget: int = 4096
    """How many blocks the scheduler may have copied in one step.

    What: an upper bound on the blocks moved a scheduler step, idle and live together.
    Unit and default: blocks a step, 4,096; 0 to 65,536. 0 moves nothing. Environment:
    ``VLLM_TAGMA_COPY_BUDGET`` (wins when set).
    When to change: lower it if steps with copies are too long; ``vllm:tagma_moved_blocks`` on
    ``/metrics`` counts what is moved.
    Example: ``--tagma-copy-budget 128`` or ``--additional-config.tagma.copy_budget 128``
    """

    copy_bytes: str = AUTO
    """How much KV the scheduler may have copied in one step.

    What: a bound as ``copy_budget``, in bytes over all layers of a device; the smaller one holds.
    Unit and default: bytes, with K, M, G or T for powers of 1,024; ``auto`` is what the device
    copies in a fifth of a step, 10 ms on a GPU (by its memory bus) and 50 ms on a CPU (measured at
    start-up). ``0`` moves nothing.
    When to change: as ``copy_budget``, where the size of a block is not what one thinks in. The
    start line says what came out.
    Example: ``--tagma-copy-bytes 512M`` or ``--additional-config.tagma.copy_bytes 512M``
    """

    pool_map_parts: int = 64
    """Resolution of the map of the pool on ``/metrics``, which ``tagma map`` draws.

    What: the pool is cut into so many equal parts; each is two series, live and cached blocks.
    Unit and default: parts, 64; 0 to 256. 0 leaves the map out.
    When to change: 0 where every time series costs money.
    Example: ``--additional-config.tagma.pool_map_parts 0``
    """

    debug_slots: bool = False
    """Compare every slot that range arithmetic computes with the block table.

    What: the worker recomputes each slot of each step from the materialised block table and
    stops the engine at the first difference.
    Unit and default: a switch, off. Environment: ``VLLM_TAGMA_DEBUG_SLOTS=1`` (wins when set).
    When to change: when outputs look wrong, and in tests. It costs one table look-up per token.
    Example: ``--additional-config.tagma.debug_slots true``
    """

    check_invariants: bool = False
    """Check the laws of ``docs/invariants.md`` after every scheduler step.

    What: the manager verifies its whole state and stops the engine on the first broken law.
    Unit and default: a switch, off. Environment: ``VLLM_TAGMA_CHECK_INVARIANTS=1`` (wins when
    set).
    When to change: when reporting a bug, and in tests. It costs time linear in the pool.
    Example: ``--additional-config.tagma.check_invariants true``
    """

    v2_interpreter: bool = False
    """Admit Model Runner V2 on a CPU under the Triton interpreter.

    What: start-up no longer refuses it, if ``TRITON_INTERPRET=1`` is set as well.
    Unit and default: a switch, off.
    When to change: in tests of the V2 path. It is slow: a Triton kernel runs as Python.
    Example: ``--additional-config.tagma.v2_interpreter true``
    """

    self_test: SelfTest = "start"
    """Whether a worker compares its kernels with their references, on the machine that serves.

    What: ``start`` runs each kernel on random rows of the model's own shapes before the first
    request, and compares all slots of the first steps with the ids. ``always`` compares those of
    all steps. ``off`` does neither, and is refused on a GPU. A difference ends the engine and names
    the kernel.
    Unit and default: a choice, ``start``.
    When to change: ``always`` when outputs look wrong on a GPU; it copies each step's slots to the
    host. ``docs/self-test.md`` says what it proves.
    Example: ``--tagma-self-test always`` or ``--additional-config.tagma.self_test always``.
    In a YAML file of ``--config`` quote ``"off"``: a bare ``off`` is false, which vLLM drops.
    """

    self_test_steps: int = 32
    """How many steps the self-test watches with ``self_test`` ``start``.

    What: the first steps of real work whose slots are compared with the ids.
    Unit and default: steps, 32; 0 to 1,000,000.
    When to change: hardly ever.
    Example: ``--additional-config.tagma.self_test_steps 1000``
    """

    @classmethod
    def from_sources(
        cls,
        additional_config: object,
        environ: Mapping[str, str] | None = None,
    ) -> TagmaConfig:
        """Read the options from ``additional_config`` and ``environ`` (default ``os.environ``).

        An environment variable that is set wins over the option, so that a debugging switch can
        be turned on without touching a deployment's command line.

        Raises:
            ConfigError: an unknown key, a wrong type, a value outside its choices or bounds, or an
                environment value that cannot be read.
        """
        values = _options(additional_config)
        values.update(_environment(os.environ if environ is None else environ))
        return cls(**values)


def backend_of(additional_config: object) -> Backend:
    """The backend that ``additional_config`` asks for; absent means ``"paged"``.

    Raises:
        ConfigError: an unknown backend, or options for tagma without a choice of backend.
    """
    if not isinstance(additional_config, Mapping):
        # vLLM also accepts an opaque object with a hash; it cannot hold our key.
        return "paged"
    if BACKEND_KEY not in additional_config:
        if OPTIONS_KEY in additional_config:
            raise ConfigError(
                f"additional_config has {OPTIONS_KEY!r} options but no {BACKEND_KEY!r}, so they "
                f"would have no effect. Add --kv-cache-backend tagma (or paged to ignore them)."
            )
        return "paged"
    return checked_backend(additional_config[BACKEND_KEY])


def checked_backend(value: object) -> Backend:
    """``value`` if it names a backend.

    Raises:
        ConfigError: it does not; the message names the choices.
    """
    for backend in BACKENDS:
        if value == backend:
            return backend
    raise ConfigError(
        f"{BACKEND_KEY}={value!r} is not a KV-cache backend. Choices: {', '.join(BACKENDS)}."
    )


def with_backend(additional_config: object, backend: object) -> dict[str, Any]:
    """A copy of ``additional_config`` that asks for ``backend``.

    Raises:
        ConfigError: ``backend`` is unknown, ``additional_config`` already asks for another one,
            or it is not a dict and so cannot carry the choice to the engine.
    """
    wanted = checked_backend(backend)
    if additional_config is None:
        return {BACKEND_KEY: wanted}
    if not isinstance(additional_config, Mapping):
        raise ConfigError(
            f"--kv-cache-backend {wanted} is carried in additional_config, which must then be a "
            f"dict, not {type(additional_config).__name__}. Give a dict or drop the flag."
        )
    present = additional_config.get(BACKEND_KEY, wanted)
    if present != wanted:
        raise ConfigError(
            f"--kv-cache-backend {wanted} contradicts {BACKEND_KEY}={present!r} in "
            f"--additional-config. Give the backend once."
        )
    return {**additional_config, BACKEND_KEY: wanted}


def with_option(additional_config: object, key: str, value: object) -> dict[str, Any]:
    """A copy of ``additional_config`` whose tagma options hold ``key: value``, from a flag.

    Raises:
        ConfigError: the backend is not tagma, so that the flag would have no effect;
            ``additional_config`` already gives the option another value; or a wrong value.
    """
    flag = flag_of(key)
    if not isinstance(additional_config, Mapping) or additional_config.get(BACKEND_KEY) != "tagma":
        raise ConfigError(
            f"{flag} {value} has no effect with the paged backend. Add --kv-cache-backend tagma or "
            f"drop {flag}."
        )
    options = _options(additional_config)
    _require_valid(key, value, where=flag)
    if options.get(key, value) != value:
        raise ConfigError(
            f"{flag} {value} contradicts {OPTIONS_KEY}.{key}={options[key]!r} in "
            f"--additional-config. Give the option once."
        )
    return {**additional_config, OPTIONS_KEY: {**options, key: value}}


def flag_of(key: str) -> str:
    """The command-line flag of an option: ``--tagma-copy-budget`` for ``copy_budget``."""
    return f"--tagma-{key.replace('_', '-')}"


def _options(additional_config: object) -> dict[str, Any]:
    if not isinstance(additional_config, Mapping):
        return {}
    given = additional_config.get(OPTIONS_KEY, {})
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"additional_config[{OPTIONS_KEY!r}] must be a dict of options, not {given!r}. "
            f"""Example: --additional-config '{{"{OPTIONS_KEY}": {{"debug_slots": true}}}}'."""
        )
    if "experimental_gpu" in given:
        raise ConfigError(
            f"additional_config[{OPTIONS_KEY!r}]['experimental_gpu'] is gone: a GPU is admitted by "
            f"the self-test of its start ({flag_of('self_test')} start, the default). Drop it."
        )
    known = _types()
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"additional_config[{OPTIONS_KEY!r}] has an unknown option {key!r}. "
                f"Known options: {', '.join(known)}."
            )
        _require_valid(key, value, where=f"additional_config[{OPTIONS_KEY!r}][{key!r}]")
    return dict(given)


def _types() -> dict[str, type]:
    return {field.name: type(field.default) for field in dataclasses.fields(TagmaConfig)}


def _require_valid(key: str, value: object, *, where: str) -> None:
    """Raise :class:`ConfigError`, beginning with ``where``, unless ``value`` fits the option."""
    wanted = _types()[key]
    if key == "compaction" and value not in COMPACTIONS:
        hint = " (YAML reads a bare off as false: quote it)" if value is False else ""
        raise ConfigError(f"{where}={value!r} must be one of {', '.join(COMPACTIONS)}{hint}.")
    if key == "self_test" and value not in SELF_TESTS:
        hint = " (YAML reads a bare off as false: quote it)" if value is False else ""
        raise ConfigError(f"{where}={value!r} must be one of {', '.join(SELF_TESTS)}{hint}.")
    # bool is a subclass of int: an exact comparison keeps `alignment: true` out.
    if type(value) is not wanted:
        raise ConfigError(
            f"{where}={value!r} must be of type {wanted.__name__}, not {type(value).__name__}."
        )
    if key == "alignment" and isinstance(value, int) and value < 1:
        raise ConfigError(f"{where}={value} must be at least 1 block.")
    if key == "copy_budget" and isinstance(value, int) and not 0 <= value <= MAX_COPY_BUDGET:
        raise ConfigError(
            f"{where}={value} must be 0 to {MAX_COPY_BUDGET} blocks a step; 0 moves nothing."
        )
    if key == "self_test_steps" and isinstance(value, int) and not 0 <= value <= MAX_TEST_STEPS:
        raise ConfigError(f"{where}={value} must be 0 to {MAX_TEST_STEPS} steps.")
    if key == "copy_bytes" and isinstance(value, str):
        try:
            bytes_of(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}.") from None
    if key == "pool_map_parts" and isinstance(value, int) and not 0 <= value <= MAX_POOL_MAP_PARTS:
        raise ConfigError(
            f"{where}={value} must be 0 to {MAX_POOL_MAP_PARTS} parts; 0 leaves the map out."
        )


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    for name in environ:
        if not name.startswith(_ENVIRONMENT_PREFIX) or name in ENVIRONMENT_NAMES:
            continue
        # Other names of this prefix belong to build and tests; a near miss is a typing error.
        meant = difflib.get_close_matches(name, ENVIRONMENT_NAMES, n=1, cutoff=0.8)
        if meant:
            raise ConfigError(
                f"unknown environment variable {name}, did you mean {meant[0]}? "
                f"Known: {', '.join(ENVIRONMENT_NAMES)}. Unset it or correct its name."
            )
    values: dict[str, Any] = {}
    types = _types()
    for key, name in _ENVIRONMENT.items():
        raw = environ.get(name)
        if raw is None:
            continue
        values[key] = _parsed(key, raw, wanted=types[key], name=name)
        _require_valid(key, values[key], where=name)
    return values


def _parsed(key: str, raw: str, *, wanted: type, name: str) -> object:
    """The value of an environment variable; strict, so that ``1_0``, `` 1`` and ``+1`` are not."""
    unset = f"Unset it to use the option {key!r}."
    if wanted is bool:
        if raw not in ("0", "1"):
            raise ConfigError(f"{name}={raw!r} must be 0 or 1. {unset}")
        return raw == "1"
    if wanted is int:
        if not re.fullmatch(r"-?[0-9]{1,18}", raw, re.ASCII):
            raise ConfigError(f"{name}={raw!r} must be a whole number. {unset}")
        return int(raw)
    return raw
