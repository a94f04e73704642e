"""Files that were handed to the project beside the checkout; their kinds have tests of their own.

They are not in the repository. Where they are absent this says so and checks nothing.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from vllm_tagma.lab.replay import formats

REQUESTS = {
    "azure_bigfield.csv": ("azure", 8, 0),
    "azure_pandas.csv": ("azure", 60, 0),
    "azure_quoted.csv": ("azure", 60, 0),
    "bailian_16_short.jsonl": ("mooncake", 160, 0),
    "bench_detailed.json": ("vllm-bench", 40, 0),
    "burstgpt.csv": ("burstgpt", 51, 9),
    "moon.jsonl.gz": ("mooncake", 60, 0),
    "moon_bom.jsonl": ("mooncake", 60, 0),
    "moon_hugedigits.jsonl": ("mooncake", 3, 1),
}
"""Format, requests and bad lines."""


def test_files_beside_the_checkout(request: pytest.FixtureRequest) -> None:
    folder = Path(request.config.rootpath).parent / "shared" / "inputs"
    present = [name for name in REQUESTS if (folder / name).is_file()]
    if len(present) < len(REQUESTS):
        absent = sorted(REQUESTS.keys() - set(present))
        warnings.warn(f"not there, so not read: {', '.join(absent)}", RuntimeWarning, stacklevel=1)
    for name in present:
        trace = formats.read(folder / name)
        assert (trace.kind, len(trace.requests), len(trace.bad)) == REQUESTS[name], name
