"""Groups from a model's configuration, and a replay whose pool they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_tagma.config import Backend
from vllm_tagma.lab.replay import loads
from vllm_tagma.lab.replay.counters import counters_of
from vllm_tagma.lab.replay.drive import Replay
from vllm_tagma.lab.replay.model_groups import group_name, group_regions
from vllm_tagma.lab.replay.replay_engine import build_scheduler
from vllm_tagma.lab.replay.replay_run import layout_of
from vllm_tagma.lab.replay.replay_settings import Settings, SettingsError, pool_blocks
from vllm_tagma.lab.replay.views import view_of

REQUESTS = loads.generate("chat", requests=60, running=8, seed=3).requests

GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "sliding_window_pattern": 6,
    "sliding_window": 512,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_FOUR_FULL = ["full, 4 layers"]
LATENT = {"model_type": "deepseek_v2", "num_hidden_layers": 3, "kv_lora_rank": 512}
STATES = {"model_type": "qwen3_next", "num_hidden_layers": 4}


def _settings(folder: Path, model: dict[str, Any], **more: Any) -> Settings:
    file = folder / "model.json"
    file.write_text(json.dumps(model), encoding="utf-8")
    return Settings(model=str(file), max_num_seqs=8, max_num_batched_tokens=1024, **more)


@pytest.mark.parametrize(
    ("model", "groups", "regions"),
    [
        # 22 layers with a window and 4 without: vLLM makes groups of 4 at most.
        (GEMMA3, ["window 512, 4 layers"] * 4 + ["window 512, 3 layers"] * 2 + _FOUR_FULL, 8),
        (GPT_OSS, ["window 128, 2 layers", "full, 2 layers"], 4),
        (LATENT, ["latent, 3 layers"], 3),
    ],
)
def test_groups_are_those_of_the_model(
    tmp_path: Path, model: dict[str, Any], groups: list[str], regions: int
) -> None:
    found = layout_of(_settings(tmp_path, model), REQUESTS).groups
    assert sorted(map(group_name, found)) == sorted(groups)
    assert max(map(group_regions, found)) == regions


def test_what_is_no_such_model_is_named(tmp_path: Path) -> None:
    for model, words in (
        ({"model_type": "no-such-model"}, "no configuration that transformers knows"),
        (STATES, "layers of the kind linear_attention hold states"),
    ):
        with pytest.raises(SettingsError, match=words):
            layout_of(_settings(tmp_path, model), REQUESTS)
    with pytest.raises(SettingsError, match=r"there is no .*config\.json"):
        layout_of(Settings(model=str(tmp_path)), REQUESTS)


def test_a_window_holds_no_more_than_it_can_see(tmp_path: Path) -> None:
    settings = _settings(tmp_path, GPT_OSS, memory="1x")
    full = pool_blocks(Settings(max_num_seqs=8, memory="1x"), REQUESTS)
    both = pool_blocks(settings, REQUESTS, layout_of(settings, REQUESTS).footprint)
    assert full < both <= full + 8 * (128 // 16 + 2)


class Recount:
    """The ids of each request's rows when it ends, as the scheduler's manager tells them."""

    def __init__(self, scheduler: Any) -> None:
        self.rows: list[list[list[int]]] = []
        manager = scheduler.kv_cache_manager
        free = manager.free

        def noted(request: Any) -> None:
            if request.is_finished():
                ids = manager.get_block_ids(request.request_id)
                self.rows.append([[block for block in row if block] for row in ids])
            free(request)

        manager.free = noted

    def runs(self, group: int) -> list[int]:
        return [
            sum(1 for i, block in enumerate(row) if not i or block != row[i - 1] + 1)
            for row in (rows[group] for rows in self.rows)
        ]


@pytest.mark.parametrize("backend", ["paged", "tagma"])
def test_ranges_are_counted_in_each_group(tmp_path: Path, backend: Backend) -> None:
    settings = _settings(tmp_path, GPT_OSS, memory="1.2x", regions=0, watermark=0.0)
    layout = layout_of(settings, REQUESTS)
    blocks = pool_blocks(settings, REQUESTS, layout.footprint)
    longest = max(request.prompt_tokens + request.output_tokens for request in REQUESTS)
    scheduler = build_scheduler(
        backend, settings, num_blocks=blocks, max_model_len=longest + 1, groups=layout.groups
    )
    recount = Recount(scheduler)
    replay = Replay(
        scheduler,
        view_of(scheduler.kv_cache_manager),
        REQUESTS,
        settings,
        capacity_blocks=blocks - 1,
        footprint=layout.footprint,
    )
    replay.run(lambda ended: None)
    counters = counters_of(replay, regions=settings.regions)
    assert counters.requests == len(REQUESTS)
    assert [group.name for group in counters.groups] == [group_name(g) for g in layout.groups]
    for group in range(2):
        assert list(replay.probe.group_total[group]) == recount.runs(group)
        assert max(map(len, (rows[group] for rows in recount.rows))) > 8
    window = next(g for g, spec in enumerate(layout.groups) if "window" in group_name(spec))
    assert max(len(rows[window]) for rows in recount.rows) <= 128 // 16 + 2
    assert counters.descriptors.max == max(
        4 * sum(runs) for runs in zip(recount.runs(0), recount.runs(1), strict=True)
    )
    assert counters.hit_tokens > 0
    assert counters.evicted_blocks > 0
    assert replay.view.live_share() == 0.0
