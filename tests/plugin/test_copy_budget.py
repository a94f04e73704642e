"""A step's copies are bounded in blocks and in bytes, and the start line says which bound holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.third_party import pynvml

from vllm_tagma.config import TagmaConfig
from vllm_tagma.copy_budget import CopyRate, bytes_of, copy_budget_of, in_words
from vllm_tagma.integration import copy_rate as rates
from vllm_tagma.integration import scheduler

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
H200 = CopyRate("cuda", 1.9e12, "by its memory bus")
CPU = CopyRate("cpu", 4e9, "measured at start-up")


def test_sizes_are_read_strictly() -> None:
    sizes = {"auto": None, "0": 0, "7": 7, "2K": 2048, "512M": 512 * MIB, "3G": 3 * GIB}
    assert {size: bytes_of(size) for size in sizes} == sizes
    for size in ("", "1.5G", "-1", "12k", "12MB", "1 G", "Auto", "\u0661"):
        with pytest.raises(ValueError, match="is neither auto nor a size such as 512M or 2G"):
            bytes_of(size)
    assert [in_words(n) for n in (12, 3 * KIB, 1.5 * MIB, GIB)] == [
        "12 B",
        "3 KiB",
        "1.5 MiB",
        "1 GiB",
    ]


@pytest.mark.parametrize(
    ("options", "block_bytes", "rate", "blocks", "why"),
    [
        ({}, 2 * MIB, H200, 4096, "copy_budget"),  # 10 ms of it are 17.7 GiB
        ({}, 8 * MIB, H200, 2264, "17.7 GiB, 10 ms at 1.73 TiB/s by its memory bus"),
        ({}, 3 * MIB, CPU, 63, "191 MiB, 50 ms at 3.73 GiB/s measured at start-up"),
        ({}, 900 * MIB, CPU, 1, "191 MiB, 50 ms"),  # some move must be possible
        ({}, 3 * MIB, None, 4096, "copy_budget; how fast this device copies is not known"),
        ({}, 0, CPU, 4096, "copy_budget"),
        ({"copy_bytes": "512M"}, 3 * MIB, None, 170, "copy_bytes 512M"),
        ({"copy_bytes": "0"}, 3 * MIB, None, 0, "copy_bytes 0"),
        ({"copy_budget": 9}, 3 * MIB, CPU, 9, "copy_budget"),
        ({"copy_budget": 0}, 3 * MIB, CPU, 0, "copy_budget"),
    ],
)
def test_the_smaller_bound_holds(
    options: dict[str, Any], block_bytes: int, rate: CopyRate | None, blocks: int, why: str
) -> None:
    given = {"copy_budget": TagmaConfig.copy_budget, "copy_bytes": "auto", **options}
    found = copy_budget_of(**given, block_bytes=block_bytes, rate=rate)
    assert found.blocks == blocks
    assert found.why.startswith(why)


def test_the_scheduler_counts_the_bytes_of_a_block_in_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [SimpleNamespace(size=100 * 2 * MIB)] * 3
    cache = SimpleNamespace(num_blocks=100, kv_cache_tensors=tensors, kv_cache_groups=["full"])
    monkeypatch.setattr(scheduler, "copy_rate", lambda: CPU)
    assert scheduler._budget(cache, TagmaConfig()).blocks == 200_000_000 // (6 * MIB) == 31
    assert scheduler._budget(cache, TagmaConfig(copy_bytes="60M")).blocks == 10
    monkeypatch.setattr(scheduler, "copy_rate", lambda: pytest.fail("nothing asks for it"))
    for options in ({"compaction": "off"}, {"copy_bytes": "60M"}):
        scheduler._budget(cache, TagmaConfig(**options))


def test_groups_share_the_bytes_and_have_blocks_of_their_own() -> None:
    tensors = [SimpleNamespace(size=100 * MIB)]
    groups = ["full", "window", "window"]
    cache = SimpleNamespace(num_blocks=100, kv_cache_tensors=tensors, kv_cache_groups=groups)
    for options, blocks, each in (
        ({"copy_bytes": "2G"}, 2048, 682),
        ({"copy_bytes": "2G", "copy_budget": 9}, 27, 9),
        ({"copy_bytes": "2M"}, 2, 1),
        ({"copy_budget": 0}, 0, 0),
    ):
        assert scheduler._budget(cache, TagmaConfig(**options)).blocks == blocks
        assert scheduler._for_each(blocks, len(groups)) == each


def test_a_cpu_is_measured() -> None:
    rate = rates.copy_rate()
    assert rate is not None
    assert (rate.device, rate.known_from) == ("cpu", "measured at start-up")
    assert 1e7 < rate.bytes_per_second < 1e12


def test_a_gpu_is_asked_without_opening_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's answers for an H200; there is no GPU here."""
    platform = SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, device_id_to_physical_device_id=lambda i: i + 3
    )
    monkeypatch.setattr(rates, "current_platform", platform)
    asked: list[int] = []
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": asked.append,
        "nvmlDeviceGetMaxClockInfo": lambda _handle, _kind: 3201,
        "nvmlDeviceGetMemoryBusWidth": lambda _handle: 6144,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    rate = rates.copy_rate()
    assert rate is not None
    assert asked == [3]
    assert rate.bytes_per_second == pytest.approx(2 * 3201e6 * 6144 / 8 / 2 * 0.8)

    def fails(*_: object) -> None:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryBusWidth", fails)
    assert rates.copy_rate() is None
