"""The options of the backend, read strictly from vLLM's ``additional_config`` and the environment.

vLLM carries ``additional_config`` into every process and into the key of its compile cache, and
ignores what it does not know. So the reading is strict here: an unknown key, a wrong type or an
unreadable environment value stops start-up with the choices named.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from vllm_tagma.errors import ConfigError

Backend = Literal["paged", "tagma"]

BACKEND_KEY: Final = "kv_cache_backend"
"""Key of ``additional_config`` that chooses the backend."""

OPTIONS_KEY: Final = "tagma"
"""Key of ``additional_config`` under which the options below are given."""

BACKENDS: Final[tuple[Backend, ...]] = ("paged", "tagma")

_ENVIRONMENT: Final = {
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

    experimental_gpu: bool = False
    """Admit GPUs, on which the range path is wired but has not been run.

    What: start-up no longer refuses vLLM's CUDA worker with Model Runner V2.
    Unit and default: a switch, off.
    When to change: to try it, best together with ``debug_slots``, after ``make gpu-check``.
    Example: ``--additional-config.tagma.experimental_gpu true``
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
            ConfigError: an unknown key, a wrong type, or an environment value other than 0 or 1.
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


def _options(additional_config: object) -> dict[str, Any]:
    if not isinstance(additional_config, Mapping):
        return {}
    given = additional_config.get(OPTIONS_KEY, {})
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"additional_config[{OPTIONS_KEY!r}] must be a dict of options, not {given!r}. "
            f"""Example: --additional-config '{{"{OPTIONS_KEY}": {{"debug_slots": true}}}}'."""
        )
    known = {field.name: type(field.default) for field in dataclasses.fields(TagmaConfig)}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"additional_config[{OPTIONS_KEY!r}] has an unknown option {key!r}. "
                f"Known options: {', '.join(known)}."
            )
        # bool is a subclass of int: an exact comparison keeps `alignment: true` out.
        if type(value) is not known[key]:
            raise ConfigError(
                f"additional_config[{OPTIONS_KEY!r}][{key!r}]={value!r} must be of type "
                f"{known[key].__name__}, not {type(value).__name__}."
            )
    if given.get("alignment", 1) < 1:
        raise ConfigError(
            f"additional_config[{OPTIONS_KEY!r}]['alignment']={given['alignment']} must be at "
            f"least 1 block."
        )
    return dict(given)


def _environment(environ: Mapping[str, str]) -> dict[str, bool]:
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
    values: dict[str, bool] = {}
    for key, name in _ENVIRONMENT.items():
        raw = environ.get(name)
        if raw is None:
            continue
        if raw not in ("0", "1"):
            raise ConfigError(f"{name}={raw!r} must be 0 or 1. Unset it to use the option {key!r}.")
        values[key] = raw == "1"
    return values
