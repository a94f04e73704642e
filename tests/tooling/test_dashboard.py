"""The Grafana dashboard asks for metrics that are exported, by labels that they have.

Ours are taken from the classes that register them; of vLLM's the names in its logger's source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics import loggers

from vllm_tagma.integration.stat_logger import TagmaStatLogger
from vllm_tagma.integration.transfer.transfer_stats import RunPromMetrics

NAME = re.compile(r"[a-zA-Z_]+:[a-zA-Z0-9_]+")
LABELS = {"model_name", "engine"}


class Exported:
    """Names of samples -> (kind, labels), of a front end with our loggers."""

    def __init__(self) -> None:
        self.samples: dict[str, tuple[str, set[str]]] = {}
        vllm = SimpleNamespace(
            per_engine_labelvalues={0: ["tiny", "0"]},
            _gauge_cls=self._making(Gauge),
            _counter_cls=self._making(Counter),
            _histogram_cls=self._making(Histogram),
        )
        TagmaStatLogger(vllm)
        kinds = (Gauge, Counter, Histogram)
        types = dict(
            zip(kinds, (vllm._gauge_cls, vllm._counter_cls, vllm._histogram_cls), strict=True)
        )
        RunPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            types,
            ["model_name", "engine"],
            {0: ["m", "0"]},
        )

    def _making(self, kind: type) -> Any:
        registry = CollectorRegistry()

        def make(*, name: str, labelnames: Any, **rest: Any) -> Any:
            rest.pop("multiprocess_mode", None)
            metric = kind(name=name, labelnames=labelnames, registry=registry, **rest)
            labels = set(labelnames)
            if kind is Gauge:
                self.samples[name] = ("gauge", labels)
            elif kind is Counter:
                self.samples[f"{name.removesuffix('_total')}_total"] = ("counter", labels)
            else:
                self.samples[f"{name}_bucket"] = ("counter", labels | {"le"})
                self.samples[f"{name}_count"] = self.samples[f"{name}_sum"] = ("counter", labels)
            return metric

        return make


@pytest.fixture(scope="module")
def exported() -> dict[str, tuple[str, set[str]]]:
    samples = Exported().samples
    assert "vllm:tagma_transfer_unmerged_total" in samples
    source = Path(loggers.__file__).read_text(encoding="utf-8")
    for kind, name in re.findall(r'_(gauge|counter)_cls\(\s*name="(vllm:\w+)"', source):
        samples.setdefault(name + ("_total" if kind == "counter" else ""), (kind, LABELS))
    return samples


@pytest.fixture(scope="module")
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    text = (request.config.rootpath / "deploy" / "grafana" / "tagma.json").read_text(
        encoding="utf-8"
    )
    return json.loads(text)


def expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and expression of each target, and of each variable that is asked for."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


def test_every_name_is_exported(dashboard, exported):
    seen = {name: where for where, text in expressions(dashboard) for name in NAME.findall(text)}
    assert {name: where for name, where in seen.items() if name not in exported} == {}


def test_every_metric_of_ours_is_shown(dashboard, exported):
    shown = {name for _, text in expressions(dashboard) for name in NAME.findall(text)}
    ours = {name for name in exported if name.startswith("vllm:tagma_")}
    assert ours - shown == set()


def test_every_label_exists(dashboard, exported):
    for where, text in expressions(dashboard):
        for name, selector in re.findall(rf"({NAME.pattern})\{{([^}}]*)\}}", text):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert used <= exported[name][1], (where, name)
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", text) for label in by.split(", ")}
        known = set().union(*(exported[name][1] for name in NAME.findall(text)))
        assert grouped <= known, where


def test_counters_are_asked_for_their_growth_and_gauges_are_not(dashboard, exported):
    for where, text in expressions(dashboard):
        grows = set(re.findall(rf"(?:rate|increase)\(({NAME.pattern})", text))
        for name in NAME.findall(text):
            assert (exported[name][0] == "counter") == (name in grows), (where, name)


def test_legends_name_labels_that_are_left(dashboard, exported):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"]
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.findall(r"by \(([^)]*)\)", text)
            left = {label for by in grouped for label in by.split(", ")}
            if "sum(" not in text and not grouped:
                left = set().union(*(exported[name][1] for name in NAME.findall(text)))
            assert wanted <= left, (panel["title"], text)


def test_panels_lie_side_by_side(dashboard):
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(text.count("(") == text.count(")") for _, text in expressions(dashboard))
