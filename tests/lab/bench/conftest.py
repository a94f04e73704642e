"""A small result with known numbers, as the schema, the comparison and the report see it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_tagma.lab.bench.schema import Result, Scenario, Variant

Make = Callable[..., Result]


@pytest.fixture
def make_result() -> Make:
    """Builds a result whose ratios against vLLM are all ``factor``."""

    def make(factor: float = 10.0, created: str = "2026-01-01T00:00:00+00:00") -> Result:
        def against_vllm(name: str, group: str, **options: object) -> Scenario:
            return Scenario(
                name=name,
                group=group,
                title=f"title of {name}",
                unit="ns/call",
                iterations=7,
                baseline="vllm",
                variants={
                    "tagma": Variant(rounds=[100.0, 110.0, 90.0]),
                    "vllm": Variant(rounds=[x * factor for x in (100.0, 110.0, 90.0)]),
                },
                **options,  # type: ignore[arg-type]
            )

        return Result(
            created=created,
            command="tagma bench host",
            quick=False,
            seconds=12.0,
            environment={
                "machine": {
                    "cpu": "Example <CPU> | 9000",
                    "cpus_online": 2,
                    "governor": None,
                    "load_average": [0.1, 0.1, 0.1],
                },
                "versions": {"vllm": "0.32.0", "vllm_tagma": "9.8.7", "python": "3.11.7"},
                "source": {"commit": "0123abc", "modified": False},
            },
            scenarios=[
                Scenario(
                    name="kv_coord_map/single_offset",
                    group="kv_coord_map",
                    title="one offset",
                    unit="ns/call",
                    iterations=1000,
                    variants={"tagma": Variant(rounds=[2.0, 4.0])},
                ),
                Scenario(
                    name="kv_slot_mapping/prefill_4k",
                    group="kv_slot_mapping",
                    title="slots of a prefill",
                    unit="ns/call",
                    iterations=10,
                    ours="range",
                    baseline="paged",
                    variants={
                        "range": Variant(
                            rounds=[5.0, 5.0], counters={"loads": 4, "positions": 4096}
                        ),
                        "paged": Variant(
                            rounds=[15.0, 15.0], counters={"loads": 4096, "positions": 4096}
                        ),
                    },
                ),
                against_vllm("manager/decode_allocate/512", "manager", target=8.0),
                against_vllm("scheduler/step/512", "scheduler", target=1.2, note="a note"),
                Scenario(
                    name="manager/memory",
                    group="manager",
                    title="memory",
                    unit="bytes/block",
                    iterations=1,
                    baseline="vllm",
                    target=96.0,
                    target_is_limit=True,
                    variants={
                        "tagma": Variant(rounds=[90.0]),
                        "vllm": Variant(rounds=[285.0]),
                    },
                ),
            ],
            skipped={"engine/tokens_per_second/256": "not part of --quick"},
        )

    return make
