"""The order of the runs, their stages, and the time that is left."""

from __future__ import annotations

import pytest

from vllm_tagma.lab.bench_serve.series import in_words
from vllm_tagma.lab.bench_serve.serve_plan import TimeLeft, differences, runs_of, stages_of


def test_runs_alternate_in_pairs(settings_of) -> None:
    runs = runs_of(settings_of(repeats=3))
    assert [run.name for run in runs] == [
        *("01-paged", "02-tagma", "03-tagma", "04-paged", "05-paged", "06-tagma"),
    ]
    assert [run.pair for run in runs] == [0, 0, 1, 1, 2, 2]


def test_recorded_runs_come_last_and_count_for_no_pair(settings_of) -> None:
    runs = runs_of(settings_of(profile_kernels=True))
    assert [run.name for run in runs[4:]] == ["05-paged-kernels", "06-tagma-kernels"]
    assert {run.pair for run in runs[4:]} == {None}
    assert [stage.name for stage in runs[-1].stages] == ["kernels"]


def test_stages(settings_of) -> None:
    stages = stages_of(settings_of(concurrency=[2, 8], request_rate=[0.5], output_requests=3))
    assert [stage.name for stage in stages] == [
        "outputs",
        *("chat-c2", "chat-c8", "chat-r0.5", "turns-c2", "turns-c8", "turns-r0.5"),
    ]
    assert stages[0].concurrency == 1
    assert [stage.is_measured for stage in stages] == [False] + [True] * 6
    assert stages[3].rate == 0.5
    assert stages[3].concurrency is None
    assert stages_of(settings_of(output_requests=0))[0].name == "chat-c4"


def test_time_left_learns(settings_of) -> None:
    settings = settings_of()
    runs, left = runs_of(settings), TimeLeft(settings)
    assert left.seconds(runs) == pytest.approx(4 * (45 + 3 * 30 + 5))
    for phase, seconds in (("start", 10), ("outputs", 1), ("chat-c4", 2), ("turns-c4", 3)):
        left.learn(phase, seconds)
    left.learn("stop", 0)
    assert left.seconds(runs) == pytest.approx(4 * 16)
    assert left.seconds(runs, done={"01-paged": 2}) == pytest.approx(4 * 16 - 11)
    left.learn("start", 20)
    assert left.seconds_of("start") == 15


def test_differences_name_the_value() -> None:
    old = {"settings": {"seed": 0, "model": "a"}, "facts": {"gpus": []}}
    new = {"settings": {"seed": 1, "model": "a"}, "facts": {"gpus": ["x"]}}
    assert differences(old, new) == ["settings.seed: 0 -> 1", "facts.gpus: [] -> ['x']"]
    assert differences(old, old) == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "5 s"), (89, "89 s"), (600, "10 min"), (7320, "2 h 2 min")]
)
def test_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
