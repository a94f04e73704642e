"""Our metrics from the scheduler to the text of ``/metrics``: vLLM's own parts, no engine.

The journey is the real one: vLLM's scheduler on our manager, vLLM's encoder and decoder between the
processes, vLLM's loggers, Prometheus's text.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.stats import KV_FETCH_STAGES, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from vllm_tagma import metrics
from vllm_tagma.integration import stats as stats_module
from vllm_tagma.integration.scheduler import TagmaScheduler
from vllm_tagma.integration.stat_logger import TagmaStatLogger, install
from vllm_tagma.integration.stats import StatsFeed

if TYPE_CHECKING:
    from conftest import ConfigFactory

TAGMA = {"kv_cache_backend": "tagma"}
BLOCK = 32
NUM_BLOCKS = 33  # one of them is vLLM's null block
ROOT = Path(__file__).parents[2]

init_none_hash(sha256)
_names = map("request {}".format, itertools.count())


class Core:
    """An engine core without a model: the scheduler, and a clock that the test moves."""

    def __init__(self, config: Any, cls: type = TagmaScheduler, *, log_stats: bool = True) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        self.scheduler = cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=NUM_BLOCKS,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            log_stats=log_stats,
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.now = 0.0
        if cls is TagmaScheduler:
            self.scheduler._stats_feed._clock = lambda: self.now

    def add(self, blocks: int, *, max_tokens: int = 1000, first: int = 3) -> Request:
        """A request whose prompt fills so many blocks; it needs another in its second step."""
        request = Request(
            request_id=next(_names),
            prompt_token_ids=[first + i % 7 for i in range(blocks * BLOCK)],
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def step(self, *, seconds: float = 10.0) -> list[EngineCoreOutputs]:
        """One step, ``seconds`` after the last, as it arrives in the front end."""
        self.now += seconds
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[5] for _ in names],
        )
        outputs = self.scheduler.update_from_output(output, done).values()
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        return [decoder.decode(encoder.encode(out)) for out in outputs]


class FrontEnd:
    """The loggers of one API server."""

    def __init__(self, config: Any, engines: list[int] | None = None) -> None:
        self.manager = StatLoggerManager(config, engine_idxs=engines)
        self.manager.log_engine_initialized()

    def record(self, arrived: list[EngineCoreOutputs], engine: int = 0) -> None:
        """What ``AsyncLLM`` does with each message."""
        for outputs in arrived:
            self.manager.record(outputs.scheduler_stats, None, engine_idx=engine)


def text() -> str:
    return generate_latest(REGISTRY).decode()


def exported(engine: int = 0) -> dict[str, float]:
    """Our samples of one engine: name and labels but engine and model -> value."""
    found = {}
    for family in text_string_to_metric_families(text()):
        for sample in family.samples:
            if not sample.name.startswith(metrics.NAME_PREFIX):
                continue
            labels = dict(sample.labels)
            if labels.pop("engine") != str(engine) or sample.name.endswith("_created"):
                continue
            assert labels.pop("model_name").endswith("tiny")
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            name = sample.name.removeprefix(metrics.NAME_PREFIX)
            found[f"{name}{{{shown}}}" if shown else name] = sample.value
    return found


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The lines of one of vLLM's loggers, whose records may not reach the root."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    yield
    unregister_vllm_metrics()


@pytest.fixture
def config(vllm_config: ConfigFactory) -> Any:
    return vllm_config(additional_config=TAGMA, served_model_name="tiny", max_model_len=1024)


def test_a_request_from_admission_to_its_end(config: Any) -> None:
    front, core = FrontEnd(config), Core(config)
    assert exported()["request_ranges_count"] == 0
    assert exported()["moved_blocks_total{state=live}"] == 0
    request = core.add(blocks=4)
    front.record(core.step())
    seen = exported()
    assert seen["requests"] == seen["ranges"] == seen["max_ranges"] == 1
    assert seen["one_range_perc"] == 1
    assert seen["pool_blocks{state=live}"] == 4
    assert seen["pool_blocks{state=cached}"] == 0
    assert seen["pool_blocks{state=hole}"] == NUM_BLOCKS - 1 - 4
    assert seen["largest_hole_blocks"] <= NUM_BLOCKS - 1 - 4
    assert seen["holes"] >= 1
    assert seen["headroom_blocks"] > 0
    assert seen["request_ranges_count"] == 0
    core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    front.record(core.step())
    seen = exported()
    assert seen["requests"] == seen["ranges"] == seen["max_ranges"] == 0
    assert seen["one_range_perc"] == 1, "nobody is in more ranges than one"
    assert seen["pool_blocks{state=live}"] == 0
    assert seen["pool_blocks{state=cached}"] == 4
    assert seen["request_ranges_count"] == seen["request_ranges_sum"] == 1
    assert seen["request_ranges_bucket{le=1.0}"] == 1


def test_the_map_adds_up(config: Any) -> None:
    front, core = FrontEnd(config), Core(config)
    core.add(blocks=6)
    front.record(core.step())
    live, cached = _map("live"), _map("cached")
    assert len(live) == len(cached) == 64
    assert (sum(live), sum(cached)) == (6, 0)
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    front.record(core.step())
    assert (sum(_map("live")), sum(_map("cached"))) == (0, 6)
    assert _map("cached") == live, "the same blocks, by address"


def _map(state: str) -> list[float]:
    seen = exported()
    pattern = re.compile(rf"pool_part_blocks{{part=(\d\d),state={state}}}")
    parts = sorted((m[1], name) for name in seen if (m := pattern.fullmatch(name)))
    return [seen[name] for _, name in parts]


def test_the_map_can_be_left_out(vllm_config: ConfigFactory) -> None:
    options = {**TAGMA, "tagma": {"pool_map_parts": 0}}
    config = vllm_config(additional_config=options, served_model_name="tiny")
    front, core = FrontEnd(config), Core(config)
    core.add(blocks=6)
    front.record(core.step())
    assert exported()["requests"] == 1
    assert _map("live") == []


def test_counters_grow_by_what_happened(config: Any) -> None:
    front, core = FrontEnd(config), Core(config)
    for first in range(3, 3 + 6):  # 6 x 8 blocks through a pool of 32: the cache must give way
        core.add(blocks=8, max_tokens=1, first=first)
        front.record(core.step())
    pool = core.scheduler.kv_cache_manager.pool.stats()
    assert pool["evictions"] >= 16
    seen = exported()
    assert seen["evicted_blocks_total"] == pool["evictions"]
    assert seen["request_ranges_count"] == 6
    front.record(core.step())
    assert exported()["evicted_blocks_total"] == pool["evictions"], "a second look adds nothing"


def test_several_front_ends_share_the_counts(config: Any) -> None:
    # vLLM hands each step's statistics to one API server; Prometheus adds up their files.
    core, totals = Core(config), []
    arrived = []
    for first in range(3, 3 + 6):
        core.add(blocks=8, max_tokens=1, first=first)
        arrived.append(core.step())
    for share in (arrived[::2], arrived[1::2]):
        front = FrontEnd(config)  # its metrics replace those of the one before
        for outputs in share:
            front.record(outputs)
        totals.append((exported()["evicted_blocks_total"], exported()["request_ranges_count"]))
    evicted, ended = map(sum, zip(*totals, strict=True))
    assert evicted == core.scheduler.kv_cache_manager.pool.stats()["evictions"]
    assert ended == 6


def test_engines_are_told_apart(config: Any) -> None:
    front, cores = FrontEnd(config, [0, 3]), {0: Core(config), 3: Core(config)}
    for engine, core in cores.items():
        core.add(blocks=1 + engine)
        front.record(core.step(), engine)
    for engine in cores:
        assert exported(engine)["pool_blocks{state=live}"] == 1 + engine


def test_vllm_loggers_see_what_they_always_saw(config: Any, vllm_config: ConfigFactory) -> None:
    core, plain = Core(config), Core(vllm_config(), Scheduler)
    for side in (core, plain):
        side.add(blocks=2)
    (ours,), (theirs,) = core.step(), plain.step()
    assert len(ours.scheduler_stats.num_kv_fetch_reqs_by_stage) > len(KV_FETCH_STAGES)
    front = FrontEnd(config)
    front.record([ours])
    assert ours.scheduler_stats == theirs.scheduler_stats
    assert core.scheduler._kv_fetch_counts == plain.scheduler._kv_fetch_counts
    with logged("vllm.v1.metrics.loggers") as lines:
        for stat_logger in front.manager.stat_loggers:
            stat_logger.log()
    assert any("Running: 1 reqs" in line for line in lines)
    assert not any("KV fetch" in line for line in lines)


def test_the_offline_api_reads_them(config: Any) -> None:
    front, core = FrontEnd(config), Core(config)
    core.add(blocks=4)
    front.record(core.step())
    found = {metric.name: metric for metric in get_metrics_snapshot()}  # LLM.get_metrics()
    assert found["vllm:tagma_requests"].value == 1
    assert found["vllm:tagma_request_ranges"].count == 0
    assert found["vllm:tagma_evicted_blocks"].value == 0


def test_a_paged_engine_has_none(vllm_config: ConfigFactory) -> None:
    install()
    front = FrontEnd(vllm_config(served_model_name="tiny"))
    assert not any(isinstance(logger, TagmaStatLogger) for logger in front.manager.stat_loggers)
    assert "vllm:tagma" not in text()
    assert "vllm:num_requests_running" in text()


def test_installing_twice_records_once(config: Any) -> None:
    install()
    install()
    front = FrontEnd(config)
    kinds = [type(logger) for logger in front.manager.stat_loggers]
    assert kinds[0] is TagmaStatLogger
    assert kinds.count(TagmaStatLogger) == kinds.count(PrometheusStatLogger) == 1


def test_few_messages_are_sent_and_the_last_state_always(config: Any) -> None:
    core = Core(config)
    request = core.add(blocks=2)

    def sends(seconds: float) -> bool:
        (outputs,) = core.step(seconds=seconds)
        return bool(metrics.take_message(outputs.scheduler_stats.num_kv_fetch_reqs_by_stage))

    assert sends(0.0)
    assert not sends(0.01)
    assert sends(stats_module.SEND_SECONDS)
    assert not sends(0.01)
    core.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert sends(0.01)


def test_a_preempted_request_has_not_ended(config: Any) -> None:
    front, core = FrontEnd(config), Core(config)
    for first in range(3, 3 + 4):  # 4 x 8 blocks fill the pool, and each needs a ninth
        core.add(blocks=8, first=first)
    for _ in range(4):
        front.record(core.step())
    assert any(r.num_preemptions for r in core.scheduler.requests.values())
    assert exported()["request_ranges_count"] == 0
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    front.record(core.step())
    assert 0 < exported()["request_ranges_count"] < 4, "who waits without blocks has no ranges"


# ---- the warning about the limit of ranges ------------------------------------------------------


class _Pool:
    """Stands in for a pool at its limit, which would need one of thousands of blocks."""

    num_free, capacity = 1, 9

    def __init__(self) -> None:
        self.totals = dict.fromkeys((*metrics.GAUGE_KEYS, *_TOTALS), 0)

    def stats(self) -> dict[str, int]:
        return self.totals


_TOTALS = ("evictions", "cap_evictions", "cap_refusals", "moved_blocks", "moved_live_blocks")


def test_moved_blocks_are_counted_by_state() -> None:
    pool = _Pool()
    feed = StatsFeed(pool, map_parts=0, clock=itertools.count().__next__)  # type: ignore[arg-type]
    added = []
    for moved, live in ((0, 0), (5, 2), (5, 2), (9, 6)):
        pool.totals |= {"moved_blocks": moved, "moved_live_blocks": live}
        stats = SchedulerStats()
        feed.add_to(stats)
        message = metrics.take_message(stats.num_kv_fetch_reqs_by_stage)
        assert message is not None
        added.append(dict(message.added))
    assert added == [
        {},
        {"moved_cached_blocks": 3, "moved_live_blocks": 2},
        {},
        {"moved_live_blocks": 4},
    ]


@pytest.mark.parametrize("kept", [True, False], ids=["statistics", "no-statistics"])
def test_the_limit_of_ranges_is_warned_of_at_once_then_once_a_minute(
    kept: bool,
) -> None:
    pool, now = _Pool(), [1000.0]
    feed = StatsFeed(pool, map_parts=0, clock=lambda: now[0])  # type: ignore[arg-type]
    with logged("vllm.tagma.stats") as shown:
        for second in range(130):
            now[0] = 1000.0 + second
            if second >= 5:
                pool.totals["cap_evictions"] += 1
                pool.totals["cap_refusals"] += 2
            feed.add_to(SchedulerStats() if kept else None)
    assert len(shown) == 3, shown
    assert "out of order 1 times and held requests back 2 times" in shown[0]
    assert "out of order 60 times and held requests back 120 times" in shown[1]
    assert "--tagma-compaction live" in shown[0]


# ---- the description ----------------------------------------------------------------------------


def test_a_message_survives_its_packing() -> None:
    message = metrics.Message(
        gauges={key: number for number, key in enumerate(metrics.GAUGE_KEYS)},
        added={"evictions": 7, "moved_live_blocks": 1},
        ended={1: 5, 256: 1},
        parts={0: (1, 2), 63: (0, 9)},
    )
    entries = {"waiting_to_start": 4, **message.pack()}
    assert metrics.take_message(entries) == message
    assert entries == {"waiting_to_start": 4}
    assert metrics.take_message(entries) is None


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    shown = set(re.findall(r"`(vllm:tagma_\w+)", page))
    counters = {f"{counter.name}_total" for counter in metrics.COUNTERS}
    gauges = {gauge.name for gauge in metrics.GAUGES} | {metrics.PART_BLOCKS}
    suffixes = {f"{metrics.REQUEST_RANGES}{end}" for end in ("_bucket", "_sum", "_count")}
    assert counters | gauges | {metrics.REQUEST_RANGES} <= shown
    assert shown <= counters | gauges | {metrics.REQUEST_RANGES} | suffixes
