"""The pool of each engine of a server, read from its ``/metrics`` and nothing else.

What is read there is declared in ``metrics.py`` and described in ``docs/metrics.md``.
"""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Final

from vllm_tagma import metrics
from vllm_tagma.errors import TagmaError

Part = tuple[int, int, int]
"""(live, cached, all) blocks of one part of the pool."""

_MAX_BYTES: Final = 64 << 20
_START: Final = "vllm serve MODEL --kv-cache-backend tagma"


class MapError(TagmaError):
    """The pool cannot be shown; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class EnginePool:
    """One engine's pool, in blocks unless said otherwise. All zero before the first step."""

    engine: str
    model: str
    parts: tuple[Part, ...]
    """By address; empty if the server was told to leave the map out."""
    requests: int
    """Requests that hold blocks."""
    ranges: int
    """Ranges of these requests together."""
    max_ranges: int
    one_range_share: float
    """0 to 1."""
    live: int
    cached: int
    hole: int
    holes: int
    largest_hole: int
    headroom: int
    evicted: int
    cap_evictions: int
    """Times, not blocks; so are the refusals."""
    cap_refusals: int
    moved_cached: int
    moved_live: int
    pinned: int
    """Blocks that a KV connector receives into or sends from."""
    transfers: int
    """KV transfers posted as runs; 0 without our connectors. So are the other two."""
    transfer_runs: int
    transfers_unmerged: int
    """Posted block by block, as vLLM does."""

    @property
    def blocks(self) -> int:
        """Size of the pool."""
        return self.live + self.cached + self.hole

    @property
    def mean_ranges(self) -> float:
        """Ranges per request that holds blocks; 0 without requests."""
        return self.ranges / self.requests if self.requests else 0.0


def metrics_url(url: str) -> str:
    """The address of ``/metrics`` for what people paste: with or without scheme, ``/v1``, ``/``.

    Raises:
        MapError: no host in it, or a scheme other than http and https.
    """
    parsed = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parsed.scheme not in ("http", "https") or not parsed.netloc:
        raise MapError(f"{url!r} is not the address of a server. Example: http://localhost:8000")
    path = parsed.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return urllib.parse.urlunsplit((parsed.scheme, parsed.netloc, f"{path}/metrics", "", ""))


def fetch(url: str, *, api_key: str | None, timeout: float) -> str:
    """The text of ``/metrics`` of the server at ``url``. ``timeout`` in seconds.

    Raises:
        MapError: nobody answers, or not with metrics.
    """
    address = metrics_url(url)
    headers = {"Accept": "text/plain"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            body: bytes = response.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise MapError(_refusal(address, error.code)) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MapError(
            f"no server answers at {address} ({reason}). Start one with `{_START}`, or give the "
            f"address of yours: tagma map http://HOST:PORT"
        ) from None
    return body.decode("utf-8", errors="replace")


def _refusal(address: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"{address} asks for authorisation (HTTP {status}). vLLM leaves /metrics open, a proxy "
            f"may not: give its key with --api-key or VLLM_API_KEY."
        )
    if status == 404:
        return f"{address} does not exist (HTTP 404): this is not a vLLM server."
    return f"{address} answers with HTTP {status}. Look at the server's log."


def read_pools(text: str, *, address: str) -> list[EnginePool]:
    """The pools of all engines in the Prometheus text ``text``, in order of engine number.

    Raises:
        MapError: the text is no metrics, not vLLM's, or of a server on the paged backend.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    parts: dict[tuple[str, str], dict[int, dict[str, int]]] = {}
    names: set[str] = set()
    for name, labels, value in _samples(text, address):
        names.add(name)
        if not name.startswith(metrics.NAME_PREFIX):
            continue
        engine = labels.get("engine", ""), labels.get("model_name", "")
        if name == metrics.PART_BLOCKS:
            part = parts.setdefault(engine, {}).setdefault(int(labels["part"]), {})
            part[labels["state"]] = int(value)
        else:
            key = name.removeprefix(metrics.NAME_PREFIX)
            key = f"{key}:{labels['state']}" if "state" in labels else key
            figures = found.setdefault(engine, {})
            # Transfers that were not merged come by reason: what is shown is their sum.
            figures[key] = figures.get(key, 0.0) + value if "reason" in labels else value
    if not found:
        raise MapError(_nothing(address, vllm=any(name.startswith("vllm:") for name in names)))
    pools = [
        _pool(engine, model, figures, parts.get((engine, model), {}))
        for (engine, model), figures in found.items()
    ]
    return sorted(pools, key=lambda pool: (len(pool.engine), pool.engine, pool.model))


def _nothing(address: str, *, vllm: bool) -> str:
    if vllm:
        return (
            f"{address} is a vLLM server on the paged backend, which has no ranges to show. Start "
            f"it with `{_START}`."
        )
    return (
        f"{address} has no metrics of vLLM: it is not a vLLM server, or one that was started with "
        f"--disable-log-stats."
    )


def _samples(text: str, address: str) -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except (ValueError, IndexError, KeyError):
        raise MapError(f"{address} does not answer with metrics: not a vLLM server.") from None


def _pool(
    engine: str, model: str, figures: dict[str, float], parts: dict[int, dict[str, int]]
) -> EnginePool:
    try:
        whole = {name: int(figures[name]) for name in _WHOLE}
        share = figures["one_range_perc"]
        states = [(parts[i]["live"], parts[i]["cached"]) for i in range(len(parts))]
    except KeyError as error:
        raise MapError(
            f"engine {engine} does not tell {error.args[0]!r}: the server runs another version of "
            f"vllm-tagma. Use the same on both sides."
        ) from None
    blocks = sum(whole[f"pool_blocks:{state}"] for state in ("live", "cached", "hole"))
    return EnginePool(
        engine=engine,
        model=model,
        parts=_sized(states, blocks),
        requests=whole["requests"],
        ranges=whole["ranges"],
        max_ranges=whole["max_ranges"],
        one_range_share=share,
        live=whole["pool_blocks:live"],
        cached=whole["pool_blocks:cached"],
        hole=whole["pool_blocks:hole"],
        holes=whole["holes"],
        largest_hole=whole["largest_hole_blocks"],
        headroom=whole["headroom_blocks"],
        evicted=whole["evicted_blocks_total"],
        cap_evictions=whole["cap_evictions_total"],
        cap_refusals=whole["cap_refusals_total"],
        moved_cached=whole["moved_blocks_total:cached"],
        moved_live=whole["moved_blocks_total:live"],
        pinned=whole["pinned_blocks"],
        transfers=int(figures.get("transfer_merged_total", 0)),
        transfer_runs=int(figures.get("transfer_runs_total", 0)),
        transfers_unmerged=int(figures.get("transfer_unmerged_total", 0)),
    )


_WHOLE: Final = (
    "requests",
    "ranges",
    "max_ranges",
    "pool_blocks:live",
    "pool_blocks:cached",
    "pool_blocks:hole",
    "holes",
    "largest_hole_blocks",
    "headroom_blocks",
    "evicted_blocks_total",
    "cap_evictions_total",
    "cap_refusals_total",
    "moved_blocks_total:cached",
    "moved_blocks_total:live",
    "pinned_blocks",
)


def _sized(states: Sequence[tuple[int, int]], blocks: int) -> tuple[Part, ...]:
    """The parts with their sizes: the pool cut into equal parts, as the native core does it."""
    count = len(states)
    return tuple(
        (live, cached, max((i + 1) * blocks // count - i * blocks // count, live + cached))
        for i, (live, cached) in enumerate(states)
    )
