"""The fixed text of the serve report: the method, the rules, and what the figures do not show."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tagma.lab.bench_serve.record import RunRecord, SeriesRecord

METHOD = (
    "Each run starts a server of its own ('vllm serve' with --kv-cache-backend), puts it through "
    "the same stages, and stops it. The backends alternate as ABBA; runs 1 and 2, 3 and 4 and so "
    "on are pairs, neighbours in time. The load comes from vLLM's own client ('vllm bench serve'); "
    "its requests were written to files before the first server started and are sent in the same "
    "order in every run, at temperature 0.",
    "A ratio is taken for each pair, tagma over paged, so that what the machine did meanwhile "
    "cancels. Shown are the geometric mean of the ratios and its Student-t interval over the "
    "pairs. Percentiles are vLLM's client's, of the requests of one run; its 'time per output "
    "token' leaves the first token out.",
)
WITHIN = (
    "In the concurrent stages, which requests share a step depends on when they arrive, and the "
    "size of a batch decides how matrix products are rounded, so that a greedy choice between two "
    "nearly equal tokens can fall differently. How often runs of the same backend differ from each "
    "other is the yardstick there. Requests sent one by one have no such excuse."
)
MEMORY = (
    "A dash: this backend does not report it. The bounds of half and of 99 % are those of a "
    "histogram's buckets; ranges include those of a shared prefix. "
    "Blocks in use are the peak of vllm:kv_cache_usage_perc over the samples of a stage; cached "
    "blocks that nobody references count as free. A peak between two samples is missed. Resident "
    "memory is summed over the server's processes, shared pages more than once; GPU memory is what "
    "the driver reports for the whole card."
)
KERNELS_ON = {
    "gpu": "Shares are of the time that kernels ran on the GPU, added up over its streams.",
    "cpu": "Shares are of the worker's steps on the CPU, by the operators inside them. Slot "
    "mapping and the block table are timed around vLLM's calls, for both backends alike. On "
    "the CPU the attention kernel reads the block table itself, so that nothing is expanded.",
}
FALSIFIES = (
    "The claim is: end to end the tagma backend is no slower than the paged one, and its answers "
    "are the same. One primary measure that the rule calls a loss refutes the first half, one "
    "differing answer among the requests sent one by one the second.",
)
_NOT_SHOWN = (
    "One machine, one model, these loads. Other context lengths, other models and a fuller cache "
    "may give other ratios.",
    "Intervals speak of servers started anew on this machine, not of other machines.",
    "Recorded conversations are replayed: a user who reads and thinks between turns would leave "
    "the cache more time to be evicted.",
    "Moving KV between machines, where contiguous ranges should count most, is not part of this.",
)
_SMOKE = (
    "The profile cpu-smoke shows that the pipeline works and that answers agree. Its model, its "
    "requests and a CPU say nothing about a GPU."
)


def not_shown(series: SeriesRecord, runs: Sequence[RunRecord]) -> list[str]:
    """What the figures do not say, and what speaks against this series."""
    doubts = []
    machine = series.environment.get("machine", {})
    load, cpus = (machine.get("load_average") or [0.0])[0], machine.get("cpus_online") or 1
    if load > 0.5 * cpus:
        doubts.append(
            f"The machine was not idle when the series began or was resumed (load average {load} "
            f"on {cpus} CPUs)."
        )
    if machine.get("hypervisor"):
        doubts.append(
            "A virtual machine: neighbours and frequency changes cannot be seen from inside."
        )
    source = series.environment.get("source") or {}
    if not source.get("commit"):
        doubts.append("The commit is not known: the package did not run from a git checkout.")
    elif source.get("modified"):
        doubts.append("The source tree differed from its commit.")
    if len({run.package for run in runs if run.is_complete}) > 1:
        doubts.append(
            "The files of vllm-tagma changed while the series ran: its runs are not of one version."
        )
    failed = [run for run in runs if not run.is_complete]
    if failed:
        doubts.append(f"Runs that failed are left out: {', '.join(run.name for run in failed)}.")
    smoke = [_SMOKE] if series.settings.get("device") == "cpu" else []
    return [*smoke, *doubts, *_NOT_SHOWN]


def rule(*, margin: float, confidence: float, primary: int, level: float) -> str:
    """The rule of the verdict in words, with its numbers."""
    return (
        f"The rule: output tokens a second, median time to first token and median time per output "
        f"token of each measured stage are the primary measures, {primary} here. A measure is a "
        f"gain if the whole interval of its ratio lies on the better side of 1 and the ratio "
        f"differs from 1 by more than {margin:.1%}, a loss if the same holds on the worse side, "
        f"and parity within noise otherwise. The intervals have level {level:.2%}, so that all of "
        f"them hold together with {confidence:.0%}. The series is a loss if any primary measure is "
        f"one, else a gain if any is one, else parity within noise. Parity says that no difference "
        f"was shown; the table says which differences would have been."
    )
