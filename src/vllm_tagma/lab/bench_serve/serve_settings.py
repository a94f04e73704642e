"""Every choice of the benchmark, once: its type, bounds, default, help, flag and TOML key.

A value comes from the first of these that names it: the flag, the TOML file, the profile, the
default here. The flags of ``tagma bench serve`` and the table in ``docs/bench-serve.md`` are made
from the fields of :class:`Settings`, so that none can be forgotten.
"""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from vllm_tagma.errors import ConfigError
from vllm_tagma.lab.json_file import SchemaError, convert

BACKENDS = ("paged", "tagma")

Size = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0.1)]


class Settings(Struct, frozen=True, kw_only=True):
    """What a series measures and how. Token counts are of the model's tokenizer; times seconds."""

    profile: Annotated[str, "Preset to start from: cpu-smoke, gpu-16k, gpu-128k."] = ""
    # ---- what is served ----
    model: Annotated[str, "Folder, or hub id that is in the local cache."] = ""
    dataset: Annotated[str, "Conversations in ShareGPT's JSON format."] = ""
    device: Annotated[Literal["cpu", "cuda"], "Where the server runs: cpu or cuda."] = "cuda"
    # ---- the server ----
    vllm_command: Annotated[str, "Command that runs vLLM (default: the one of this Python)."] = ""
    host: Annotated[str, "Address the server listens on."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535), "Port the server listens on."] = 8700
    dtype: Annotated[str, "vLLM's --dtype."] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=32), "Context of the server, prompt and output together."
    ] = 16_384
    block_size: Annotated[Size, "Positions a KV block holds; 0: vLLM's choice."] = 0
    kv_cache_memory_bytes: Annotated[Size, "Bytes of KV blocks; 0: what memory allows."] = 0
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0.0, le=1.0), "Share of the GPU's memory that vLLM may take."
    ] = 0.9
    enforce_eager: Annotated[bool, "Serve without CUDA graphs and compilation."] = False
    omp_threads: Annotated[Count, "OpenMP threads of a server on the CPU."] = 1
    server_args: Annotated[str, "More flags of 'vllm serve' for both backends, as one string."] = ""
    paged_args: Annotated[str, "More flags of the paged server only."] = ""
    tagma_args: Annotated[str, "More flags of the tagma server only."] = ""
    # ---- the load ----
    workloads: Annotated[
        list[Literal["chat", "turns"]], "Kinds of load, repeatable: chat, turns."
    ] = field(default_factory=lambda: ["chat", "turns"])
    concurrency: Annotated[list[Count], "Requests in flight; repeatable, one stage each."] = field(
        default_factory=lambda: [16]
    )
    request_rate: Annotated[list[Rate], "Arrivals a second; repeatable, one stage each."] = field(
        default_factory=list
    )
    num_requests: Annotated[Count, "Requests of each stage."] = 64
    min_context: Annotated[int, Meta(ge=8), "Least prompt tokens of a chat request."] = 256
    max_context: Annotated[int, Meta(ge=8), "Most prompt tokens of any request."] = 4_096
    max_output: Annotated[Count, "Most output tokens of a request."] = 256
    turns: Annotated[Count, "Turns of a conversation of the turns workload."] = 4
    system_tokens: Annotated[Size, "Tokens of the prompt that all those conversations share."] = 256
    history_tokens: Annotated[Size, "Tokens of older talk that each of them begins with."] = 0
    output_requests: Annotated[Size, "Requests sent one by one, whose answers are compared."] = 8
    output_tokens: Annotated[Count, "Output tokens of each of those."] = 32
    ignore_eos: Annotated[bool, "Generate all output tokens asked for, so work is equal."] = True
    seed: Annotated[Size, "Seed of the server, the client and the choice of conversations."] = 0
    # ---- the series ----
    repeats: Annotated[int, Meta(ge=2), "Servers of each backend; they alternate as ABBA."] = 2
    on_failure: Annotated[
        Literal["stop", "continue"], "After a failed run: stop, or continue with the next."
    ] = "stop"
    sample_interval: Annotated[
        float, Meta(ge=0.05), "Seconds between samples of metrics and memory."
    ] = 1.0
    ready_timeout: Annotated[Seconds, "Seconds a server may take to start."] = 1_800.0
    stage_timeout: Annotated[Seconds, "Seconds a stage may take."] = 7_200.0
    stop_timeout: Annotated[Seconds, "Seconds a server may take to end before it is killed."] = 30.0
    disk_bytes: Annotated[Size, "Bytes that must be free where the output goes."] = 1 << 30
    margin: Annotated[
        float, Meta(ge=0), "Differences below this share are parity, however certain."
    ] = 0.01
    confidence: Annotated[float, Meta(ge=0.5, lt=1.0), "Level of the confidence intervals."] = 0.95
    # ---- the read path ----
    profile_kernels: Annotated[bool, "Record kernels too, in one more run of each backend."] = False
    profile_requests: Annotated[Count, "Requests of the recorded stage."] = 16
    profile_steps: Annotated[Count, "Steps that are recorded at most."] = 100

    def to_json(self) -> dict[str, Any]:
        """As recorded with the series."""
        return asdict(self)


TYPES: dict[str, Any] = typing.get_type_hints(Settings)
HELP: dict[str, str] = {
    name: annotated.__metadata__[-1]
    for name, annotated in typing.get_type_hints(Settings, include_extras=True).items()
}


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
    return _settings({**profiles.get(profile, {}), **chosen})


def from_json(document: Mapping[str, Any], *, source: str) -> Settings:
    """The settings that a series recorded. Raises ConfigError like :func:`resolve`."""
    return _settings(_known(document, source=source), source=source)


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file; keys are field names, ``-`` and ``_`` are the same.

    Raises ConfigError for a file that cannot be read, an unknown key, or a value of the wrong type
    or out of bounds.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    source = f"--config {path}"
    values = _known(document, source=source)
    _converted(values, source=source)  # a fault is reported with the file it stands in
    return values


def _known(document: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in HELP:
            raise ConfigError(
                f"{source}: {key!r} is not a setting{_nearest(name, HELP)}. "
                "'tagma bench serve --help' lists them all."
            )
        values[name] = value
    return values


def _settings(values: Mapping[str, Any], *, source: str = "") -> Settings:
    settings = _converted(values, source=source)
    check(settings)
    return settings


def _converted(values: Mapping[str, Any], *, source: str) -> Settings:
    try:
        return convert(values, Settings)
    except SchemaError as error:
        name, bracket, item = error.path.removeprefix("$.").partition("[")
        raise ConfigError(
            f"{source}{': ' if source else ''}{flag_of(name)}{bracket}{item} is {error.value!r}: "
            f"{error.reason}. {HELP[name]}"
        ) from None


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def check(settings: Settings) -> None:
    """Raises ConfigError for values that do not go together."""
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
    """The type of the flag, or None where it is not given. Words are checked later."""
    wanted = TYPES[name]
    (inner,) = typing.get_args(wanted) if typing.get_origin(wanted) is list else (wanted,)
    plain = str if typing.get_origin(inner) is Literal else inner
    return (list[plain] if inner is not wanted else plain) | None  # type: ignore[valid-type]
