"""``--kv-cache-backend`` and the option flags through vLLM's real parser, every order and form."""

from __future__ import annotations

import dataclasses
import pickle
import re
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_tagma  # noqa: F401  - wires EngineArgs


def _serve_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for command in cmd_init():
        command.subparser_init(subparsers)
    return parser


@pytest.fixture(scope="module")
def serve() -> FlexibleArgumentParser:
    return _serve_parser()


def _parse(parser: FlexibleArgumentParser, *arguments: str) -> Namespace:
    return parser.parse_args(["serve", "some/model", *arguments])


FLAG = ["--kv-cache-backend", "tagma"]
OTHER = ["--additional-config", '{"a": 1}']


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (FLAG, {"kv_cache_backend": "tagma"}),
        (["--kv-cache-backend=tagma"], {"kv_cache_backend": "tagma"}),
        (["--kv_cache_backend", "tagma"], {"kv_cache_backend": "tagma"}),
        (["--kv-cache-backend", "paged"], {"kv_cache_backend": "paged"}),
        (FLAG + OTHER, {"a": 1, "kv_cache_backend": "tagma"}),
        (OTHER + FLAG, {"a": 1, "kv_cache_backend": "tagma"}),
        (["--additional-config.kv_cache_backend", "tagma"], {"kv_cache_backend": "tagma"}),
        (
            ["--additional-config.tagma.debug_slots", "true", *FLAG],
            {"tagma": {"debug_slots": True}, "kv_cache_backend": "tagma"},
        ),
        (
            [*FLAG, "--additional-config", '{"kv_cache_backend": "tagma"}'],
            {"kv_cache_backend": "tagma"},
        ),
    ],
)
def test_the_flag_ends_in_additional_config(
    serve: FlexibleArgumentParser, arguments: list[str], expected: dict[str, object]
) -> None:
    assert _parse(serve, *arguments).additional_config == expected


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--tagma-compaction", "off"], {"compaction": "off"}),
        (["--tagma-compaction=live"], {"compaction": "live"}),
        (["--tagma_compaction", "idle"], {"compaction": "idle"}),
        (["--tagma-copy-budget", "0"], {"copy_budget": 0}),
        (["--tagma-copy-bytes", "512M"], {"copy_bytes": "512M"}),
        (["--tagma-self-test", "always"], {"self_test": "always"}),
        (
            ["--tagma-copy-budget", "9", "--tagma-compaction", "live"],
            {"compaction": "live", "copy_budget": 9},
        ),
        (
            ["--tagma-copy-budget", "9", "--additional-config.tagma.debug_slots", "true"],
            {"copy_budget": 9, "debug_slots": True},
        ),
        (
            ["--tagma-copy-budget", "9", "--additional-config.tagma.copy_budget", "9"],
            {"copy_budget": 9},
        ),
        (["--additional-config.tagma.compaction", "off"], {"compaction": "off"}),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_option_flags_end_in_additional_config(
    serve: FlexibleArgumentParser, arguments: list[str], options: dict[str, object], order: int
) -> None:
    parts = [FLAG, arguments][::order]
    found = _parse(serve, *parts[0], *parts[1]).additional_config
    assert found == {"kv_cache_backend": "tagma", "tagma": options}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tagma-compaction", "live"], "live has no effect.*Add --kv-cache-backend tagma"),
        (
            ["--tagma-copy-budget", "1", "--kv-cache-backend", "paged"],
            "--tagma-copy-budget 1 has no effect with the paged backend",
        ),
        ([*FLAG, "--tagma-copy-budget", "-1"], "--tagma-copy-budget=-1 must be 0 to 65536"),
        ([*FLAG, "--tagma-copy-budget", "many"], "--tagma-copy-budget.*invalid int value: 'many'"),
        ([*FLAG, "--tagma-compaction", "none"], "--tagma-compaction.*invalid choice: 'none'"),
        (
            [*FLAG, "--tagma-copy-budget", "2", "--additional-config.tagma.copy_budget", "3"],
            "2 contradicts tagma.copy_budget=3 in --additional-config",
        ),
    ],
)
def test_wrong_option_flags_are_parser_errors(
    serve: FlexibleArgumentParser,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stop:
        _parse(serve, *arguments)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_options_in_a_config_file(serve: FlexibleArgumentParser, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("kv-cache-backend: tagma\ntagma-compaction: 'off'\ntagma-copy-budget: 8\n")
    parsed = _parse(serve, "--config", str(file))
    assert parsed.additional_config["tagma"] == {"compaction": "off", "copy_budget": 8}


def test_parsing_does_not_change_the_next_parsing(serve: FlexibleArgumentParser) -> None:
    assert _parse(serve, *FLAG).additional_config == {"kv_cache_backend": "tagma"}
    assert _parse(serve).additional_config == {}


@pytest.mark.parametrize("order", [1, -1])
def test_a_contradiction_is_a_parser_error(
    serve: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], order: int
) -> None:
    parts = [FLAG, ["--additional-config", '{"kv_cache_backend": "paged"}']][::order]
    with pytest.raises(SystemExit) as stop:
        _parse(serve, *parts[0], *parts[1])
    assert stop.value.code == 2
    assert "contradicts kv_cache_backend='paged'" in capsys.readouterr().err


def test_an_unknown_backend_is_a_parser_error(
    serve: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _parse(serve, "--kv-cache-backend", "range")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "paged" in error
    assert "tagma" in error


@pytest.mark.parametrize(
    "content",
    [
        {"kv-cache-backend": "tagma", "additional-config": {"a": 1}},
        {"additional-config": {"a": 1, "kv_cache_backend": "tagma"}},
    ],
)
def test_a_config_file_works(
    serve: FlexibleArgumentParser, tmp_path: Path, content: dict[str, object]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content))
    parsed = _parse(serve, "--config", str(file))
    assert parsed.additional_config == {"a": 1, "kv_cache_backend": "tagma"}


def test_the_command_line_contradicting_a_config_file_is_an_error(
    serve: FlexibleArgumentParser, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"additional-config": {"kv_cache_backend": "paged"}}))
    with pytest.raises(SystemExit):
        _parse(serve, "--config", str(file), *FLAG)


def test_the_help_shows_the_flag(
    serve: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with pytest.raises(SystemExit) as stop:
            _parse(serve, "--help=kv-cache-backend")
    finally:
        FlexibleArgumentParser._search_keyword = None
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "{paged,tagma}" in shown
    assert "refused at start-up" in " ".join(shown.split())


def test_the_help_shows_the_option_flags(
    serve: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with pytest.raises(SystemExit):
            _parse(serve, "--help=vllm-tagma")
    finally:
        FlexibleArgumentParser._search_keyword = None
    shown = " ".join(capsys.readouterr().out.split())
    assert "--tagma-compaction {off,idle,live}" in shown
    assert "--tagma-copy-budget BLOCKS" in shown
    assert "0 to 65536. Default: 4096." in shown


def test_the_namespace_crosses_a_spawn(serve: FlexibleArgumentParser, tmp_path: Path) -> None:
    # API-server children get it pickled and run from_cli_args before plugins are loaded.
    parsed = pickle.loads(pickle.dumps(Namespace(**_picklable(_parse(serve, *FLAG)))))
    parsed.model = str(tmp_path)  # vLLM asks a hub for its default model where it may not
    assert AsyncEngineArgs.from_cli_args(parsed).additional_config == {"kv_cache_backend": "tagma"}


def _picklable(parsed: Namespace) -> dict[str, object]:
    # vLLM's own sub-command adds its dispatch function, which it does not send either.
    return {k: v for k, v in vars(parsed).items() if k != "dispatch_function"}


@pytest.mark.parametrize("declare", [EngineArgs.add_cli_args, AsyncEngineArgs.add_cli_args])
def test_every_command_with_engine_arguments_has_the_flag(declare: object) -> None:
    parser = declare(FlexibleArgumentParser())  # type: ignore[operator]
    parsed = parser.parse_args([*OTHER, *FLAG])
    assert parsed.additional_config == {"a": 1, "kv_cache_backend": "tagma"}


def test_the_engine_arguments_keep_their_fields() -> None:
    for owner in (EngineArgs, AsyncEngineArgs):
        assert "kv_cache_backend" not in {field.name for field in dataclasses.fields(owner)}
