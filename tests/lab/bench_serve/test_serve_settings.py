"""Where a setting comes from, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_tagma.errors import ConfigError
from vllm_tagma.lab.bench.bench_command import app
from vllm_tagma.lab.bench_serve.profiles import GUESSES, PROFILES
from vllm_tagma.lab.bench_serve.serve_settings import (
    HELP,
    Settings,
    from_json,
    read_toml,
    resolve,
)


def toml(folder: Path, text: str) -> Path:
    path = folder / "series.toml"
    path.write_text(text)
    return path


def test_flag_over_file_over_profile_over_default(tmp_path: Path) -> None:
    path = toml(tmp_path, 'profile = "cpu-smoke"\nrepeats = 3\nnum-requests = 9\nseed = 2\n')
    found = resolve(flags={"seed": 4}, config=path, profiles=PROFILES)
    assert (found.seed, found.repeats, found.num_requests) == (4, 3, 9)
    assert found.dtype == "float32"  # the profile's
    assert found.host == Settings().host
    assert resolve(flags={"profile": "gpu-16k"}, config=path, profiles=PROFILES).repeats == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repeat = 3", "'repeat' is not a setting; did you mean 'repeats'?"),
        ("max-contxt = 3", "did you mean 'max_context'?"),
        ("xyzzy = 3", "'xyzzy' is not a setting. 'tagma bench serve --help'"),
        (
            'repeats = "3"',
            "series.toml: --repeats is '3': expected `int`, got `str`. Servers of each",
        ),
        ("repeats = true", "--repeats is True: expected `int`, got `bool`"),
        ("concurrency = 4", "--concurrency is 4: expected `array`, got `int`"),
        ("repeats = ", "is not TOML"),
        ('profile = "gpu-16"', "--profile gpu-16 is not known; did you mean 'gpu-16k'?"),
        ("repeats = 1", "--repeats is 1: expected `int` >= 2"),
        ("concurrency = [4, 0]", "--concurrency[1] is 0: expected `int` >= 1"),
        ("request-rate = [0.0]", "--request-rate[0] is 0.0: expected `float` > 0"),
        (
            'workloads = ["chats"]',
            "--workloads[0] is 'chats': invalid enum value 'chats'. Kinds of load, repe",
        ),
        ("port = 70000", "--port is 70000: expected `int` <= 65535"),
        ("concurrency = []", "no load: give --concurrency or --request-rate"),
        ("concurrency = [4, 4]", "--concurrency names a value twice"),
        ("min-context = 5000", "--min-context 5000 is above --max-context 4096"),
        ("max-context = 16384", "above --max-model-len 16384"),
        (
            'on-failure = "go"',
            "--on-failure is 'go': invalid enum value 'go'. After a failed run: stop, or continue",
        ),
        ("confidence = 1.0", "--confidence is 1.0: expected `float` < 1.0"),
        ("sample-interval = 0.0", "--sample-interval is 0.0: expected `float` >= 0.05"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags={}, config=toml(tmp_path, text), profiles=PROFILES)
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        read_toml(tmp_path / "absent.toml")


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_are_valid_and_survive_the_record(profile: str) -> None:
    found = resolve(flags={"profile": profile}, config=None, profiles=PROFILES)
    assert from_json(found.to_json(), source="series.json") == found
    assert profile in GUESSES
    assert set(PROFILES[profile]) <= set(HELP)


def test_every_setting_has_a_flag_and_a_line_in_the_docs(pytestconfig: pytest.Config) -> None:
    command = next(c for c in app.registered_commands if c.name == "serve")
    assert command.callback is not None
    assert set(HELP) <= set(inspect.signature(command.callback).parameters)
    text = (pytestconfig.rootpath / "docs" / "bench-serve.md").read_text()
    for name, meaning in HELP.items():
        assert f"`{name.replace('_', '-')}`" in text, name
        assert meaning in text, name


def test_wrong_options_end_with_2() -> None:
    for flags, words in (
        ([], "choose a --profile (cpu-smoke, gpu-16k, gpu-128k)"),
        (["--profile", "cpu-smoke"], "--output DIR is missing"),
        (
            ["--profile", "cpu-smoke", "--repeats", "1", "-o", "x"],
            "serve: --repeats is 1: expected `int` >= 2",
        ),
        (["--resume", "-o", "absent"], "absent holds no series"),
    ):
        done = CliRunner().invoke(app, ["serve", *flags])
        assert done.exit_code == 2, done.output
        assert words in done.output
