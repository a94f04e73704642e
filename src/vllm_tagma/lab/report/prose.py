"""The fixed text of the report, and values put into words."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_tagma.lab.bench import core_source
from vllm_tagma.lab.bench.schema import Result

METHOD = [
    "One process, pinned to one CPU, measures everything but the engine. A round is one warm-up "
    "call and then the timed calls; means and standard deviations are over rounds. Native "
    "scenarios read the clock inside C++, once before and once after a round. Manager scenarios "
    "read it around each call where state must be rebuilt between calls, else around the round.",
    "Where two implementations are compared, their rounds alternate, and the order is reversed "
    "every second round. A ratio is taken for each pair of rounds and the median of those is "
    "shown, so that a machine that slows down half way changes both sides alike. Both see the same "
    "requests, token ids, block hashes and pool size; hashes are vLLM's SHA-256. Python's garbage "
    "collector is off inside rounds, for both.",
    "The scheduler scenarios run vLLM's own Scheduler class, whole, with made-up model outputs. "
    "The engine scenario runs vllm.LLM with a 2-layer Llama of random weights on the CPU, one "
    "fresh process a round, paged and tagma in turn.",
]

SLOTS = (
    "A block table answers each position with a load; a range answers all positions that lie in it "
    "with one look-up and an addition. The first scenarios are plain C++ loops compiled with the "
    "same flags; 'vllm kernel' calls vLLM's own CPU kernel and our range table from Python, as the "
    "worker does."
)
LOADS = (
    "Loads per position: entries of the table (of block ids, or of ranges) that are read for a "
    "batch, divided by its positions. Decoding touches one position a request, so both need one."
)
WHOLE = (
    "A manager that cost nothing would still leave the rest of the scheduler, so these figures say "
    "what a user gets."
)

_NOT_SHOWN = (
    "No GPU ran. Attention kernels, KV writes and transfers are not part of any figure.",
    "Real models spend most of a step in the model; the gain there is smaller than with the "
    "2-layer model, and nothing where the host is not the bottleneck.",
    "Caches are warm: the same operation repeats. A call between two model steps finds less of its "
    "data in the CPU's caches, in both managers.",
    "Hashing the prompt's blocks is vLLM's work, the same for both, and left out.",
    "Single operations on a quiet pool: fragmentation under a real request mix is what "
    "'tagma replay' measures, not this report.",
    "One machine. Ratios carry over to others better than times do, but not exactly.",
    "KV connectors, speculative decoding, sliding windows, hybrid and MLA models are not served by "
    "the backend and not measured.",
)


def not_shown(result: Result) -> list[str]:
    """What the figures do not say, and what this run left out."""
    skipped = [f"Not measured in this run: {n} ({why})." for n, why in result.skipped.items()]
    doubts = []
    machine = result.environment.get("machine", {})
    load, cpus = (machine.get("load_average") or [0.0])[0], machine.get("cpus_online") or 1
    if load > 0.5 * cpus:
        doubts.append(
            f"The machine was not idle when the run began (load average {load} on {cpus} CPUs)."
        )
    if machine.get("hypervisor"):
        doubts.append(
            "A virtual machine: neighbours and frequency changes cannot be seen from inside."
        )
    if not (result.environment.get("source") or {}).get("commit"):
        doubts.append("The commit is not known: the package did not run from a git checkout.")
    elif result.environment["source"].get("modified"):
        doubts.append("The source tree differed from its commit.")
    doubts += core_source.differences(result.environment.get("source") or {})
    return [*_NOT_SHOWN, *doubts, *skipped]


def leaves(value: object, prefix: str = "") -> list[tuple[str, object]]:
    """Dotted names and values of a nested mapping."""
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [
        leaf
        for key, inner in value.items()
        for leaf in leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    ]


def readable(value: object) -> str:
    """A recorded value for people; what the system did not say is called unknown."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    return str(value)
