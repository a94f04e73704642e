"""A replay from its trace to its result: one backend after the other, in this process.

Imports vLLM; ``replay_command.py`` sets the environment before it comes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from vllm_tagma.config import Backend
from vllm_tagma.lab.replay.counters import counters_of, times_of
from vllm_tagma.lab.replay.drive import Replay
from vllm_tagma.lab.replay.model_groups import footprint, model_groups
from vllm_tagma.lab.replay.replay_engine import build_config, build_scheduler
from vllm_tagma.lab.replay.replay_settings import ONE_ROW, Footprint, Settings
from vllm_tagma.lab.replay.result import BackendResult
from vllm_tagma.lab.replay.trace import TraceRequest
from vllm_tagma.lab.replay.views import view_of

Progress = Callable[[int], None]
OnStep = Callable[[Replay], None]


class Layout(NamedTuple):
    """The KV-cache groups of a model, and what requests hold in them. No groups stand for one with
    full attention."""

    groups: tuple[KVCacheGroupSpec, ...]
    footprint: Footprint


ONE_GROUP = Layout((), ONE_ROW)


def layout_of(settings: Settings, requests: Sequence[TraceRequest]) -> Layout:
    """The layout that ``settings.model`` asks for. Raises ``SettingsError`` as ``model_groups``."""
    if settings.model is None:
        return ONE_GROUP
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    config = build_config("paged", settings, max_model_len=longest + 1)
    groups = model_groups(Path(settings.model), config)
    return Layout(tuple(groups), footprint(groups, config))


def replay_backend(
    backend: Backend,
    requests: Sequence[TraceRequest],
    settings: Settings,
    *,
    num_blocks: int,
    layout: Layout = ONE_GROUP,
    progress: Progress = lambda ended: None,
    on_step: OnStep | None = None,
) -> tuple[BackendResult, Replay]:
    """Replays ``requests`` on one backend; the second value holds what the pictures need.

    ``layout``: the groups that share the pool (``layout_of``). Raises what vLLM and the plugin
    raise at start-up.
    """
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    scheduler = build_scheduler(
        backend,
        settings,
        num_blocks=num_blocks,
        max_model_len=longest + 1,
        groups=layout.groups,
    )
    replay = Replay(
        scheduler,
        view_of(scheduler.kv_cache_manager),
        requests,
        settings,
        capacity_blocks=num_blocks - 1,
        footprint=layout.footprint,
        on_step=on_step,
    )
    begin = time.perf_counter()
    replay.run(progress)
    wall_seconds = time.perf_counter() - begin
    result = BackendResult(
        counters=counters_of(replay, regions=settings.regions),
        times=times_of(replay, wall_seconds=wall_seconds),
        unfit=[requests[index].place for index in replay.unfit],
        stuck=[requests[index].place for index in replay.stuck],
    )
    return result, replay
