"""The finished configuration: the right class names, the same each time, or a refusal."""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from vllm_tagma import versions
from vllm_tagma.errors import ConfigError, SeamError, UnsupportedError
from vllm_tagma.integration import engine_args as patches
from vllm_tagma.integration import seams
from vllm_tagma.integration.seams import seam_check

if TYPE_CHECKING:
    from conftest import ConfigFactory

SCHEDULER = "vllm_tagma.integration.scheduler.TagmaScheduler"
ASYNC_SCHEDULER = "vllm_tagma.integration.scheduler.TagmaAsyncScheduler"
WORKER = "vllm_tagma.integration.worker_v1.TagmaCPUWorker"
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
TAGMA = {"kv_cache_backend": "tagma"}


def _classes(config: Any) -> tuple[Any, str]:
    return config.scheduler_config.scheduler_cls, config.parallel_config.worker_cls


@pytest.mark.parametrize("additional", [{}, {"kv_cache_backend": "paged"}])
def test_paged_is_untouched(vllm_config: ConfigFactory, additional: dict[str, str]) -> None:
    assert _classes(vllm_config(additional_config=additional)) == (None, STOCK_WORKER)


def test_tagma_chooses_both_classes(vllm_config: ConfigFactory) -> None:
    assert _classes(vllm_config(additional_config=TAGMA)) == (SCHEDULER, WORKER)
    assert _classes(vllm_config(kv_cache_backend="tagma")) == (SCHEDULER, WORKER)


def test_the_choice_survives_pickling_and_replacing(vllm_config: ConfigFactory) -> None:
    config = vllm_config(additional_config=TAGMA)
    assert _classes(pickle.loads(pickle.dumps(config))) == (SCHEDULER, WORKER)
    replaced = dataclasses.replace(config.parallel_config)
    assert replaced.worker_cls == WORKER


def test_finalising_again_changes_nothing(engine_args: ConfigFactory) -> None:
    arguments = engine_args(additional_config=TAGMA)
    first, second = arguments.create_engine_config(), arguments.create_engine_config()
    assert _classes(first) == _classes(second) == (SCHEDULER, WORKER)
    assert _classes(patches.finalise(first)) == (SCHEDULER, WORKER)
    assert arguments.scheduler_cls is None


def test_async_scheduling_gets_the_asynchronous_base(vllm_config: ConfigFactory) -> None:
    # The CPU platform switches it off, so it is set on the finished configuration.
    config = vllm_config()
    config.scheduler_config.async_scheduling = True
    assert patches.finalise(config).scheduler_config.scheduler_cls == ASYNC_SCHEDULER


def test_our_own_scheduler_class_given_by_hand_is_accepted(vllm_config: ConfigFactory) -> None:
    config = vllm_config(additional_config=TAGMA, scheduler_cls=SCHEDULER)
    assert _classes(config) == (SCHEDULER, WORKER)


def test_an_unknown_backend_or_option_stops_the_configuration(engine_args: ConfigFactory) -> None:
    with pytest.raises(ConfigError, match="Choices: paged, tagma"):
        engine_args(additional_config={"kv_cache_backend": "rope"}).create_engine_config()
    wrong = {**TAGMA, "tagma": {"debug": True}}
    with pytest.raises(ConfigError, match=r"unknown option 'debug'.*Known options: alignment"):
        engine_args(additional_config=wrong).create_engine_config()


def test_a_wrong_environment_value_stops_tagma_but_not_paged(
    engine_args: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TAGMA_DEBUG_SLOTS", "yes")
    engine_args().create_engine_config()
    with pytest.raises(ConfigError, match="VLLM_TAGMA_DEBUG_SLOTS='yes' must be 0 or 1"):
        engine_args(additional_config=TAGMA).create_engine_config()


def test_our_environment_variables_are_known_to_vllm(
    engine_args: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAGMA_VLLM033", raising=False)  # of the test run, not of the product
    monkeypatch.setenv("VLLM_TAGMA_CHECK_INVARIANTS", "1")
    strict = engine_args(additional_config=TAGMA, fail_on_environ_validation=True)
    assert _classes(strict.create_engine_config()) == (SCHEDULER, WORKER)
    monkeypatch.setenv("VLLM_NO_SUCH_VARIABLE", "1")
    with pytest.raises(ValueError, match="VLLM_NO_SUCH_VARIABLE"):
        strict.create_engine_config()


def test_an_unknown_version_refuses_tagma_and_serves_paged(
    engine_args: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_vllm_version", lambda root=None: "0.34.0")
    assert _classes(engine_args().create_engine_config()) == (None, STOCK_WORKER)
    with pytest.raises(
        SeamError, match=r"vLLM 0\.34\.0 is not known .* knows vLLM 0\.32 and 0\.33"
    ):
        engine_args(additional_config=TAGMA).create_engine_config()


def test_a_seam_that_does_not_fit_refuses_tagma_and_serves_paged(
    engine_args: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = [dataclasses.replace(s, expected="(self, surprise)") for s in seams.SEAMS[:1]]
    monkeypatch.setattr(seam_check, "SEAMS", changed)
    engine_args().create_engine_config()
    with pytest.raises(
        SeamError, match=r"add_cli_args: expected \(self, surprise\), found @static"
    ):
        engine_args(additional_config=TAGMA).create_engine_config()


def test_refused_configurations_list_every_reason(engine_args: ConfigFactory) -> None:
    arguments = engine_args(
        additional_config={**TAGMA, "tagma": {"alignment": 2}}, scheduler_cls="some.Scheduler"
    )
    with pytest.raises(UnsupportedError) as error:
        arguments.create_engine_config()
    first, second = str(error.value).splitlines()
    assert "--scheduler-cls is some.Scheduler" in first
    assert "['alignment'] is 2 blocks" in second
