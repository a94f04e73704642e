"""pytest plugin for vLLM's own tests: put this package's classes in vLLM's place and write results.

    pytest -p upstream_plugin --upstream-backend tagma --upstream-results FILE tests/v1/core

With ``stock`` nothing is put in place; the results then say which tests pass here at all. The file
gets one JSON object a test, an ``upstream_classes.Observation``, and a last line that says that all
were run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from upstream_classes import Observation, describe

_KEY = "upstream_observation"
_recorder = None


def pytest_addoption(parser):
    group = parser.getgroup("upstream")
    group.addoption("--upstream-backend", choices=("stock", "tagma"), default="stock")
    group.addoption("--upstream-results", help="file for one JSON object per test")


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu_test: vLLM's mark for tests without a GPU")
    config.addinivalue_line("markers", "skip_global_cleanup: read by vLLM's conftest")
    spreads = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if config.getoption("--upstream-backend") == "tagma" and not spreads:
        global _recorder
        from upstream_stand_in import Recorder

        _recorder = Recorder()
        _recorder.put_in_place()
    if not hasattr(config, "workerinput") and config.getoption("--upstream-results"):
        config.pluginmanager.register(_Writer(Path(config.getoption("--upstream-results"))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if _recorder is not None:
        _recorder.start_test()
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item):
    """The laws of every manager that the test built are checked at its end."""
    result = yield
    if _recorder is not None:
        _recorder.check_invariants()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    error = describe(call.excinfo.value) if call.excinfo is not None else None
    seen = _recorder.seen() if _recorder is not None else {}
    setattr(report, _KEY, {"error": error, **seen})
    return report


class _Writer:
    """Joins the reports of a test's phases and writes one line when it is over."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._open: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report):
        test = self._open.setdefault(report.nodeid, {"outcome": "passed", "error": None})
        test.update((k, v) for k, v in getattr(report, _KEY, {}).items() if v or k not in test)
        if report.outcome != "passed" and test["outcome"] == "passed":
            test["outcome"] = report.outcome
        if report.when == "teardown":
            del self._open[report.nodeid]
            self._write(report.nodeid, test)

    def pytest_collectreport(self, report):
        """A module that cannot be imported, or skips itself, is one entry."""
        if not report.passed:
            text = str(report.longrepr).strip().splitlines()[-1]
            error = {"type": "module", "message": text, "place": ""}
            self._write(report.nodeid, {"outcome": report.outcome, "error": error})

    def pytest_sessionfinish(self):
        self._file.write(json.dumps({"finished": time.time()}) + "\n")
        self._file.close()

    def _write(self, nodeid, test):
        observation = Observation(test=nodeid, **test)
        self._file.write(json.dumps(vars(observation)) + "\n")
        self._file.flush()
