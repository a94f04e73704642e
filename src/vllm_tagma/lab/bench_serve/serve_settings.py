"""Every choice of the benchmark, once: its type, default, help, flag and TOML key.

A value comes from the first of these that names it: the flag, the TOML file, the profile, the
default here. The flags of ``tagma bench serve`` and the table in ``docs/bench-serve.md`` are made
from the fields of :class:`Settings`, so that none can be forgotten.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_tagma.errors import ConfigError

BACKENDS = ("paged", "tagma")
WORKLOADS = ("chat", "turns")
DEVICES = ("cpu", "cuda")
ON_FAILURE = ("stop", "continue")


def _choice(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a series measures and how. Token counts are of the model's tokenizer; times seconds."""

    profile: str = _choice("", "Preset to start from: cpu-smoke, gpu-16k, gpu-128k.")
    # ---- what is served ----
    model: str = _choice("", "Folder, or hub id that is in the local cache.")
    dataset: str = _choice("", "Conversations in ShareGPT's JSON format.")
    device: str = _choice("cuda", "Where the server runs: cpu or cuda.")
    # ---- the server ----
    vllm_command: str = _choice("", "Command that runs vLLM (default: the one of this Python).")
    host: str = _choice("127.0.0.1", "Address the server listens on.")
    port: int = _choice(8700, "Port the server listens on.")
    dtype: str = _choice("auto", "vLLM's --dtype.")
    max_model_len: int = _choice(16_384, "Context of the server, prompt and output together.")
    block_size: int = _choice(0, "Positions a KV block holds; 0: vLLM's choice.")
    kv_cache_memory_bytes: int = _choice(0, "Bytes of KV blocks; 0: what memory allows.")
    gpu_memory_utilization: float = _choice(0.9, "Share of the GPU's memory that vLLM may take.")
    enforce_eager: bool = _choice(False, "Serve without CUDA graphs and compilation.")
    omp_threads: int = _choice(1, "OpenMP threads of a server on the CPU.")
    server_args: str = _choice("", "More flags of 'vllm serve' for both backends, as one string.")
    paged_args: str = _choice("", "More flags of the paged server only.")
    tagma_args: str = _choice("", "More flags of the tagma server only.")
    # ---- the load ----
    workloads: list[str] = field(
        default_factory=lambda: ["chat", "turns"],
        metadata={"help": "Kinds of load, repeatable: chat, turns."},
    )
    concurrency: list[int] = field(
        default_factory=lambda: [16],
        metadata={"help": "Requests in flight; repeatable, one stage each."},
    )
    request_rate: list[float] = field(
        default_factory=list, metadata={"help": "Arrivals a second; repeatable, one stage each."}
    )
    num_requests: int = _choice(64, "Requests of each stage.")
    min_context: int = _choice(256, "Least prompt tokens of a chat request.")
    max_context: int = _choice(4_096, "Most prompt tokens of any request.")
    max_output: int = _choice(256, "Most output tokens of a request.")
    turns: int = _choice(4, "Turns of a conversation of the turns workload.")
    system_tokens: int = _choice(256, "Tokens of the prompt that all those conversations share.")
    history_tokens: int = _choice(0, "Tokens of older talk that each of them begins with.")
    output_requests: int = _choice(8, "Requests sent one by one, whose answers are compared.")
    output_tokens: int = _choice(32, "Output tokens of each of those.")
    ignore_eos: bool = _choice(True, "Generate all output tokens asked for, so that work is equal.")
    seed: int = _choice(0, "Seed of the server, the client and the choice of conversations.")
    # ---- the series ----
    repeats: int = _choice(2, "Servers of each backend; they alternate as ABBA.")
    on_failure: str = _choice("stop", "After a failed run: stop, or continue with the next.")
    sample_interval: float = _choice(1.0, "Seconds between samples of metrics and memory.")
    ready_timeout: float = _choice(1_800.0, "Seconds a server may take to start.")
    stage_timeout: float = _choice(7_200.0, "Seconds a stage may take.")
    stop_timeout: float = _choice(30.0, "Seconds a server may take to end before it is killed.")
    disk_bytes: int = _choice(1 << 30, "Bytes that must be free where the output goes.")
    margin: float = _choice(0.01, "Differences below this share are parity, however certain.")
    confidence: float = _choice(0.95, "Level of the confidence intervals.")
    # ---- the read path ----
    profile_kernels: bool = _choice(False, "Also record kernels, in one more run of each backend.")
    profile_requests: int = _choice(16, "Requests of the recorded stage.")
    profile_steps: int = _choice(100, "Steps that are recorded at most.")

    def to_json(self) -> dict[str, Any]:
        """As recorded with the series."""
        return dataclasses.asdict(self)


FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in fields(Settings)}
TYPES: dict[str, Any] = typing.get_type_hints(Settings)


def flag_of(name: str) -> str:
    """``max_context`` is ``--max-context``."""
    return "--" + name.replace("_", "-")


def resolve(
    *,
    flags: Mapping[str, Any],
    config: Path | None,
    profiles: Mapping[str, Mapping[str, Any]],
) -> Settings:
    """The settings from flags over TOML over profile over defaults.

    Raises:
        ConfigError: an unknown profile or TOML key (the nearest name is given), a value of the
            wrong type, or one out of bounds.
    """
    chosen = read_toml(config) if config is not None else {}
    chosen.update({name: value for name, value in flags.items() if value is not None})
    profile = chosen.get("profile", "")
    if profile and profile not in profiles:
        raise ConfigError(
            f"--profile {profile} is not known{_nearest(profile, profiles)}. There are: "
            f"{', '.join(profiles)}."
        )
    preset = dict(profiles.get(profile, {}))
    settings = Settings(**{**preset, **chosen})
    check(settings)
    return settings


def from_json(document: Mapping[str, Any], *, source: str) -> Settings:
    """The settings that a series recorded. Raises ConfigError like :func:`resolve`."""
    settings = Settings(**_typed_values(document, source=source))
    check(settings)
    return settings


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file; keys are field names, ``-`` and ``_`` are the same.

    Raises ConfigError for a file that cannot be read, an unknown key or a wrong type.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    return _typed_values(document, source=f"--config {path}")


def _typed_values(document: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise ConfigError(
                f"{source}: {key!r} is not a setting{_nearest(name, FIELDS)}. "
                "'tagma bench serve --help' lists them all."
            )
        values[name] = _typed(name, value, source=source)
    return values


def _typed(name: str, value: Any, *, source: str) -> Any:
    wanted = TYPES[name]
    if typing.get_origin(wanted) is list:
        (inner,) = typing.get_args(wanted)
        if not isinstance(value, list) or not all(_fits(item, inner) for item in value):
            raise ConfigError(f"{source}: {name} = {value!r} must be a list of {inner.__name__}")
        return [inner(item) for item in value]
    if not _fits(value, wanted):
        raise ConfigError(f"{source}: {name} = {value!r} must be of type {wanted.__name__}")
    return wanted(value)


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


_AT_LEAST: dict[str, float] = {
    "max_model_len": 32,
    "num_requests": 1,
    "min_context": 8,
    "max_context": 8,
    "max_output": 1,
    "turns": 1,
    "output_tokens": 1,
    "repeats": 2,
    "profile_requests": 1,
    "profile_steps": 1,
    "omp_threads": 1,
    "sample_interval": 0.05,
    "ready_timeout": 0.1,
    "stage_timeout": 0.1,
    "stop_timeout": 0.1,
    **dict.fromkeys(
        ("block_size", "kv_cache_memory_bytes", "margin", "system_tokens", "history_tokens"), 0
    ),
    **dict.fromkeys(("output_requests", "disk_bytes", "seed"), 0),
}
_ONE_OF = {"device": DEVICES, "on_failure": ON_FAILURE}


def check(settings: Settings) -> None:
    """Raises ConfigError for values that are out of bounds or do not go together."""
    for name, least in _AT_LEAST.items():
        value = getattr(settings, name)
        if value < least:
            raise ConfigError(f"{flag_of(name)} {value} is below {least:g}")
    for name, known in _ONE_OF.items():
        value = getattr(settings, name)
        if value not in known:
            raise ConfigError(f"{flag_of(name)} {value!r} is not one of {', '.join(known)}")
    for workload in settings.workloads:
        if workload not in WORKLOADS:
            raise ConfigError(f"--workloads {workload!r} is not one of {', '.join(WORKLOADS)}")
    if not 1 <= settings.port <= 65_535:
        raise ConfigError(f"--port {settings.port} is not between 1 and 65535")
    if not 0.5 <= settings.confidence < 1.0:
        raise ConfigError(f"--confidence {settings.confidence} is not in 0.5..1")
    if not 0.0 < settings.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization} is not in 0..1"
        )
    if any(load < 1 for load in settings.concurrency):
        raise ConfigError(f"--concurrency {min(settings.concurrency)} is below 1")
    if any(rate <= 0 for rate in settings.request_rate):
        raise ConfigError(f"--request-rate {min(settings.request_rate)} must be above 0")
    if settings.workloads and not settings.concurrency and not settings.request_rate:
        raise ConfigError("no load: give --concurrency or --request-rate")
    for name in ("workloads", "concurrency", "request_rate"):
        values = getattr(settings, name)
        if len(set(values)) != len(values):
            raise ConfigError(f"{flag_of(name)} names a value twice: {values}")
    if settings.min_context > settings.max_context:
        raise ConfigError(
            f"--min-context {settings.min_context} is above --max-context {settings.max_context}"
        )
    need = settings.max_context + max(settings.max_output, settings.output_tokens)
    if need > settings.max_model_len:
        raise ConfigError(
            f"--max-context {settings.max_context} and the longest output together need {need} "
            f"tokens, above --max-model-len {settings.max_model_len}: lower them or raise it"
        )


def option_type(name: str) -> Any:
    """The type of the flag: the setting's own, or None where the flag was not given."""
    wanted = TYPES[name]
    return wanted | types.NoneType if typing.get_origin(wanted) is None else wanted | None
