"""The workers of Model Runner V2: vLLM's runner around ``TagmaBlockTables``.

V2 builds its ``BlockTables`` by a global name inside ``initialize_kv_cache`` and hands the object
to four holders there, so it cannot be replaced afterwards. While that method runs, the name stands
for our class (``name_swap.py``); right after, the type is checked.

Seam 1, ``worker_cls``: ``TagmaWorker`` for CUDA, ``TagmaV2CPUWorker`` for the Triton interpreter.
Seam 2, ``Worker._make_model_runner``: vLLM's own hook for subclasses.
Seam 3, ``GPUModelRunner.initialize_kv_cache``, as above. It can go when vLLM lets a runner name its
block table class.
Seam 4, ``GPUModelRunner.add_requests`` and ``update_requests``: from before the first to behind the
second the block tables know the step's row updates (``row_updates.py``). It can go when vLLM's
scheduler output can say that a running row changed.
Seam 5, ``RequestState.index_to_req_id``: which request a table row belongs to when it is written.
Seam 6, ``copy_kv_cache_blocks_inplace``: while ``update_requests`` runs, our mover stands for it
(``block_copies.py``).

``TagmaWorker`` has not run on a GPU yet: the self-test of each start stands in for that
(``start_test.py``). The CPU worker exists to test everything above the GPU's own code generator.
"""

from __future__ import annotations

import atexit
import functools
from typing import Any

import vllm.v1.worker.gpu.model_runner as _runner_module
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_tagma import support
from vllm_tagma.config import TagmaConfig
from vllm_tagma.errors import SeamError, UnsupportedError
from vllm_tagma.integration import backend_registration, range_backend, start_test
from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.integration.block_tables_v2 import TagmaBlockTables
from vllm_tagma.integration.name_swap import name_stands_for
from vllm_tagma.integration.row_updates import by_group, row_updates_of
from vllm_tagma.integration.seams import require_seams
from vllm_tagma.worker.slot_audit import SlotAudit


class _RangeRunner:
    """What both runners add: block tables made of ranges, written from the step's row updates."""

    block_tables: Any
    req_states: Any
    vllm_config: Any
    slot_audit: SlotAudit | None = None
    block_copies: BlockCopies

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        if self.slot_audit is None:  # called once more while memory is profiled
            self.slot_audit = audit_of(self.vllm_config)
        self.block_copies = BlockCopies(interpreted=True)
        options = TagmaConfig.from_sources(self.vllm_config.additional_config)
        build = functools.partial(
            TagmaBlockTables,
            keep_id_rows=False,
            audit=self.slot_audit,
            request_of=self._request_of,
            first_steps=start_test.self_test_steps(options),
        )
        with name_stands_for(_runner_module, "BlockTables", BlockTables, build):
            super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        if type(self.block_tables) is not TagmaBlockTables:
            raise SeamError(
                f"vLLM built {type(self.block_tables).__name__} instead of TagmaBlockTables: it no "
                "longer calls BlockTables by that name."
            )
        range_backend.attach(self)
        more = range_backend.start_checks(self)
        start_test.check_v2(self, options, self.block_copies, more)

    def _request_of(self, row: int) -> str | None:
        request: str | None = self.req_states.index_to_req_id.get(row)
        return request

    def add_requests(self, scheduler_output: Any) -> None:
        # Requests that ended are gone by now, and no row has been appended to yet.
        updates = row_updates_of(scheduler_output)
        self.block_tables.updates = by_group(updates, self.block_tables.num_kv_cache_groups)
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def update_requests(self, scheduler_output: Any) -> None:
        with self.block_copies.stand_in(_runner_module, scheduler_output):
            super().update_requests(scheduler_output)  # type: ignore[misc]
        self.block_tables.apply_updates(self.req_states.req_id_to_index.get)


class TagmaGPUModelRunner(_RangeRunner, GPUModelRunner):  # type: ignore[misc]
    """vLLM's V2 runner whose block tables are ranges."""


class TagmaV2CPUModelRunner(_RangeRunner, CPUModelRunner):  # type: ignore[misc]
    """The same on the CPU, under the Triton interpreter."""


class _AuditedWorker:
    """What ``debug_slots`` adds to a worker."""

    model_runner: Any

    def slot_audit_counters(self) -> dict[str, int] | None:
        """What ``debug_slots`` has checked so far, or None when it is off."""
        audit = self.model_runner.slot_audit
        return None if audit is None else audit.counters()

    def shutdown(self) -> None:
        audit = getattr(getattr(self, "model_runner", None), "slot_audit", None)
        if audit is not None:
            audit.log_summary()
        super().shutdown()  # type: ignore[misc]


class TagmaWorker(_AuditedWorker, Worker):  # type: ignore[misc]
    """vLLM's CUDA worker with ``TagmaGPUModelRunner``."""

    def _make_model_runner(self) -> Any:
        require_seams("worker", "worker_v2")
        backend_registration.register()
        support.require_supported(self.vllm_config)
        stock = "Model Runner V1" if not self.use_v2_model_runner else None
        if self.vllm_config.is_mm_encoder_only:
            stock = "the runner of multimodal encoders"
        if stock is not None:
            raise UnsupportedError(
                f"On a GPU {stock} has no range path; Model Runner V2 has. Unset "
                "VLLM_USE_V2_MODEL_RUNNER, or serve with --kv-cache-backend paged."
            )
        return TagmaGPUModelRunner(self.vllm_config, self.device)


class TagmaV2CPUWorker(_AuditedWorker, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with Model Runner V2 under the Triton interpreter: for tests."""

    def init_device(self) -> None:
        require_seams("worker", "worker_v2")
        backend_registration.register()
        support.require_supported(self.vllm_config)
        super().init_device()
        runner = self.model_runner
        if type(runner) is not CPUModelRunner:
            raise UnsupportedError(
                f"{type(runner).__module__}.{type(runner).__qualname__} is not Model Runner V2 for "
                "CPU. Serve without the option v2_interpreter, or with --kv-cache-backend paged."
            )
        runner.__class__ = TagmaV2CPUModelRunner


def audit_of(vllm_config: Any) -> SlotAudit | None:
    """The audit that ``debug_slots`` asks for; it logs its summary at exit."""
    if not TagmaConfig.from_sources(vllm_config.additional_config).debug_slots:
        return None
    audit = SlotAudit()
    atexit.register(audit.log_summary)  # an engine in the caller's process may never be shut down
    return audit
