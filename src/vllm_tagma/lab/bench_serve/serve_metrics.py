"""What the server says about itself: ``/health`` and the Prometheus text of ``/metrics``.

Names are vLLM's. A metric that a server does not have reads as None, never as 0: the two backends
and the releases of vLLM do not all have the same ones.
"""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field

KV_USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
FINISHED = "vllm:request_success_total"
CACHE_INFO = "vllm:cache_config_info"
# Those of the tagma backend: docs/metrics.md.
TAGMA_PREFIX = "vllm:tagma_"
TAGMA_RANGES = "vllm:tagma_ranges"
TAGMA_REQUESTS = "vllm:tagma_requests"
TAGMA_MAX_RANGES = "vllm:tagma_max_ranges"
SAMPLED = (
    *(KV_USAGE, RUNNING, WAITING, PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS, FINISHED),
    *(TAGMA_RANGES, TAGMA_REQUESTS, TAGMA_MAX_RANGES),
)

_TIMEOUT_SECONDS = 5.0
# A proxy of the environment must not stand between us and our own server.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(kw_only=True)
class Snapshot:
    """``values``: sums over engines and labels. ``buckets``: of histograms, by upper bound,
    cumulative. ``cache``: the labels of vLLM's cache configuration."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    cache: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> float | None:
        """The value of a metric, or None where there is no such metric."""
        return self.values.get(name)


def base_url(host: str, port: int) -> str:
    """The address to reach a server that listens on ``host``."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def is_healthy(base: str) -> bool:
    """Whether ``/health`` answers 200."""
    with contextlib.suppress(urllib.error.URLError, OSError, ValueError):
        _OPENER.open(f"{base}/health", timeout=2.0).close()
        return True
    return False


def fetch(base: str) -> str | None:
    """The text of ``/metrics``; None if the server does not answer with one."""
    with (
        contextlib.suppress(urllib.error.URLError, OSError, ValueError),
        _OPENER.open(f"{base}/metrics", timeout=_TIMEOUT_SECONDS) as response,
    ):
        return str(response.read().decode("utf-8", errors="replace"))
    return None


def sampled(text: str) -> dict[str, float]:
    """The few values that are sampled while a load runs; much cheaper than :func:`parse`."""
    lines = [line for line in text.splitlines() if line.startswith(SAMPLED)]
    return parse("\n".join(lines) + "\n").values


def parse(text: str) -> Snapshot:
    """All of it. Text that is not Prometheus' format gives what was read until there."""
    from prometheus_client.parser import text_string_to_metric_families

    snapshot = Snapshot()
    with contextlib.suppress(ValueError):
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                if name == CACHE_INFO:
                    snapshot.cache = dict(labels)
                elif "le" in labels:
                    by_bound = snapshot.buckets.setdefault(name.removesuffix("_bucket"), {})
                    bound = float(labels["le"])
                    by_bound[bound] = by_bound.get(bound, 0.0) + value
                elif name == KV_USAGE:
                    snapshot.values[name] = max(snapshot.values.get(name, 0.0), value)
                else:
                    snapshot.values[name] = snapshot.values.get(name, 0.0) + value
    return snapshot


def bucket_quantile(buckets: dict[float, float], share: float) -> float | None:
    """The least upper bound of a cumulative histogram that ``share`` of the values do not exceed.

    None for an empty histogram; infinity where the values lie beyond the last bound.
    """
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    return next(bound for bound in sorted(buckets) if buckets[bound] >= share * total)


def bucket_difference(
    after: dict[float, float], before: Iterable[tuple[float, float]]
) -> dict[float, float]:
    """The values that a histogram took up between two snapshots."""
    earlier = dict(before)
    return {bound: count - earlier.get(bound, 0.0) for bound, count in after.items()}
