"""Whole series on a stand-in for vLLM: order, files, failures, interruption, resumption."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_tagma.lab.bench_serve.process import Interrupted, interruptible

if TYPE_CHECKING:
    from conftest import Lab

ABBA = ["01-paged", "02-tagma", "03-tagma", "04-paged"]
STAGES = ["outputs", "chat-c4", "turns-c4"]


def wait_for(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_series_runs_abba_and_leaves_everything_behind_but_processes(lab: Lab) -> None:
    status, text = lab.run("--workloads", "turns")
    assert status == 0, text
    servers = [line for line in lab.started() if line.startswith("serve")]
    assert servers == ["serve paged", "serve tagma", "serve tagma", "serve paged"]
    for name in ABBA:
        folder = lab.output / "runs" / name
        record = lab.record(name)
        assert record["error"] is None
        assert len(record["package"]) == 64
        assert record["pair"] == (0 if name < "03" else 1)
        assert list(record["stages"]) == STAGES
        for file in ("server.log", "samples.jsonl", "metrics.prom", "chat-c4.json", "chat-c4.log"):
            assert (folder / file).stat().st_size > 0 or file.endswith(".log"), file
    stage = lab.record("02-tagma")["stages"]["chat-c4"]
    assert stage["counters"] == {
        "preemptions": 1.0,  # requests 3 to 6 of the stand-in
        "prefix_queries": 400.0,
        "prefix_hits": 100.0,
        "finished": 4.0,
    }
    assert stage["kv"]["peak_blocks"] == 50  # half of 101 blocks less the null block
    assert stage["memory"]["rss_peak"] > 1 << 20
    assert stage["ranges"] == {
        "evicted_blocks_total": 40.0,
        "request_ranges_mean": 1.0,
        "request_ranges_p50": 1.0,
        "request_ranges_p99": 1.0,
        "max_ranges_peak": 5.0,
    }
    assert lab.record("01-paged")["stages"]["chat-c4"]["ranges"] == {}
    series = json.loads((lab.output / "series.json").read_text())
    assert series["plan"]["facts"]["dataset"]
    assert series["environment"]["versions"]["vllm"]
    assert series["workload"]["turns-c4"]["requests"] == 4
    report = (lab.output / "report" / "report.md").read_text()
    assert "all 2 requests that were sent one by one got the same text" in report
    assert (lab.output / "report" / "figures" / "latency-chat-c4.svg").exists()
    assert "min left" in text or "s left" in text
    assert lab.left_behind() == []


def test_a_server_killed_in_mid_run_ends_the_series_with_its_log(lab: Lab) -> None:
    status, text = lab.run(die_in="tagma:1", patient=True)
    assert status == 1
    assert "the server ended with status 7 during chat-c4" in text
    assert "    RuntimeError: the engine core died" in text
    assert "--on-failure continue" in text
    assert lab.record("02-tagma")["error"].startswith("the server ended with status 7")
    assert not (lab.output / "runs" / "03-tagma").exists()
    assert lab.left_behind() == []

    status, text = lab.resume()
    assert status == 0, text
    assert "resuming: 1 of 4 runs are complete" in text
    servers = [line for line in lab.started() if line.startswith("serve")]
    # The first two of the first call, then all but the complete one.
    assert servers[2:] == ["serve tagma", "serve tagma", "serve paged"]
    assert lab.record("02-tagma")["error"] is None
    assert (lab.output / "runs" / "02-tagma.discarded-1" / "server.log").exists()


def test_a_failure_can_be_passed_over(lab: Lab) -> None:
    status, text = lab.run("--on-failure", "continue", die_in="tagma:1")
    assert status == 1
    assert "1 of 4 runs failed: 02-tagma" in text
    assert [lab.record(name)["error"] is None for name in ABBA] == [True, False, True, True]
    report = (lab.output / "report" / "report.md").read_text()
    assert "Only 3 of 4 runs are complete" in report
    assert "RuntimeError: the engine core died" in report
    assert "not measured" in report  # one pair is no comparison


def test_ctrl_c_leaves_no_process_and_the_series_can_be_resumed(lab: Lab) -> None:
    with lab.start(delay=0.5, orphan=True, stubborn=True) as process:
        wait_for(lambda: any("01-paged chat" in line for line in lab.started()))
        assert len(lab.left_behind()) >= 4  # runner, server, its child, client
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)  # the server is stubborn: do not wait for it
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in text
    assert f"tagma bench serve --output {lab.output} --resume" in text
    assert "Traceback" not in text
    wait_for(lambda: lab.left_behind() == [], seconds=10)

    status, text = lab.resume()
    assert status == 0, text
    assert (lab.output / "runs" / "01-paged.discarded-1").is_dir()
    assert (lab.output / "report" / "report.html").exists()


def test_one_signal_is_enough(lab: Lab) -> None:
    with lab.start(never_ready=True) as process:
        wait_for(lambda: "serve paged" in lab.started())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
    wait_for(lambda: lab.left_behind() == [], seconds=10)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(Interrupted, match="SIGHUP"), interruptible():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_runner_that_is_killed_outright_takes_the_server_with_it(lab: Lab) -> None:
    with lab.start(delay=0.5) as process:
        wait_for(lambda: any("01-paged chat" in line for line in lab.started()))
        process.kill()
        process.communicate(timeout=60)
    wait_for(lambda: lab.left_behind() == [], seconds=30)


def test_resuming_something_else_is_refused(lab: Lab, dataset_file: Path) -> None:
    lab.run(fail_start="paged")
    before = lab.started()
    status, text = lab.run("--resume", "--seed", "5", "--num-requests", "5")
    assert status == 1
    assert "settings.seed: 0 -> 5" in text
    assert "settings.num_requests: 4 -> 5" in text
    requests = lab.output / "workload" / "chat-c4.jsonl"
    requests.write_text(requests.read_text().replace("words", "Words"))
    status, text = lab.resume()
    assert status == 1
    assert "is not the file that was written when the series began" in text
    assert lab.started() == before


def test_an_output_that_is_taken_is_refused(lab: Lab, tmp_path: Path) -> None:
    lab.run(fail_start="paged")
    status, text = lab.run()
    assert status == 1
    assert "holds a series already" in text
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    status, text = lab.run("--output", str(tmp_path / "other"))
    assert (status, "holds something else" in text) == (1, True)
    status, text = lab.run("--output", str(tmp_path / "new"), "--resume")
    assert (status, "holds no series" in text) == (1, True)


def test_a_gpu_is_sampled_and_named(lab: Lab, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*--loop-ms=*) while echo "0, 2048, 97, 310.5, 1980, 54"; do sleep 0.1; done;;\n'
        '*) echo "0, NVIDIA H100 80GB HBM3, 570.10, 81559, 4";;\n'
        "esac\n"
    )
    program.chmod(0o755)
    flags = ["--device", "cuda", "--output-requests", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        status, text = lab.run(*flags)
    assert status == 0, text
    record = lab.record("02-tagma")
    assert record["stages"]["chat-c4"]["memory"]["gpu_peak"] == 2048 << 20
    assert not any("tagma." in word for word in record["commands"]["server"])
    series = json.loads((lab.output / "series.json").read_text())
    assert series["environment"]["gpus"][0]["driver"] == "570.10"
    report = (lab.output / "report" / "report.md").read_text()
    assert "| chat-c4 | peak GPU memory (GiB) | 2 | 2 |" in report
    assert "on NVIDIA H100 80GB HBM3" in report
    assert "No requests were sent one by one" in report
    assert lab.left_behind() == []


@pytest.mark.parametrize(
    ("flags", "behaviour", "words"),
    [
        ([], {"fail_start": "paged"}, ["ended with status 3 before it was ready", "this is why"]),
        (["--ready-timeout", "1"], {"never_ready": True}, ["was not ready after 1 s"]),
        (["--stage-timeout", "1"], {"delay": 9.0}, ["outputs took longer than 1 s"]),
        ([], {"fail_requests": 1}, ["1 of 2 requests succeeded", "ConnectionError: reset"]),
        ([], {"result": False}, ["the client left no result for outputs"]),
    ],
)
def test_what_goes_wrong_is_said(lab: Lab, flags: list, behaviour: dict, words: list) -> None:
    status, text = lab.run("--stop-timeout", "1", *flags, **behaviour)
    assert status == 1
    for word in words:
        assert word in text
    assert lab.record("01-paged")["error"]
    assert lab.left_behind() == []


def test_a_port_that_is_taken_starts_nothing(lab: Lab) -> None:
    port = int(lab.flags[lab.flags.index("--port") + 1])
    with socket.create_server(("127.0.0.1", port)):
        status, text = lab.run()
    assert status == 1
    assert f"port: 127.0.0.1:{port} cannot be used (Address already in use)" in text
    assert "choose another with --port" in text
    assert lab.started() == []
    assert not lab.output.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["does not exist", "--profile cpu-smoke brings its own"]),
        ('[\n {"id": "a",\n  "conversations": [}\n]', ["line 3, column 21", "not JSON"]),
        (
            '[\n{"conversations": []},\n{"id": "b", "turns": []}]',
            ["line 3: conversation 'b' has no list 'conversations', found only id, turns"],
        ),
    ],
)
def test_a_dataset_that_is_none_starts_nothing(
    lab: Lab, tmp_path: Path, content: str | None, words: list[str]
) -> None:
    path = tmp_path / "sharegpt.json"
    if content is not None:
        path.write_text(content)
    status, text = lab.run("--dataset", str(path))
    assert status == 1
    for word in [str(path), *words]:
        assert word in text
    assert lab.started() == []


def test_other_answers_and_longer_times_are_seen(lab: Lab) -> None:
    status, text = lab.run(answers={"tagma": " other"}, slower={"tagma": 2.0})
    assert status == 0
    assert "Verdict: loss. Answers DIFFER: 2 of 2 requests" in text
    report = (lab.output / "report" / "report.md").read_text()
    assert "| outputs | 2 | 2 | 0 | 0 | yes |" in report
    assert " other'" in report
    assert "It rests on chat-c4, output tokens -" in report
