"""Call a function on a module as soon as it has been imported.

``import vllm_tagma`` must make ``LLM(kv_cache_backend=...)`` work, but importing vLLM for it would
cost every ``tagma --help`` ten seconds and would recurse when vLLM itself is importing this
package as a plugin. A finder at the head of ``sys.meta_path`` waits for one module, lets the other
finders load it as they would have, and calls back after its body has run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` now if module ``name`` is loaded, else right after its import.

    Asking twice for the same pair calls back once per import. If the module is being imported at
    this moment its body is not complete; then nothing happens and the caller must ask again later
    (vLLM does: it calls the plugin when all of its modules are loaded).
    """
    module = sys.modules.get(name)
    if module is None:
        if not any(isinstance(f, _Waiter) and f.waits(name, callback) for f in sys.meta_path):
            sys.meta_path.insert(0, _Waiter(name=name, callback=callback))
        return
    if not getattr(module.__spec__, "_initializing", False):
        callback(module)


class _Waiter(MetaPathFinder):
    """Finds only ``name``, by asking the other finders, and wraps its loader."""

    def __init__(self, *, name: str, callback: Callback) -> None:
        self._name = name
        self._callback = callback

    def waits(self, name: str, callback: Callback) -> bool:
        return self._name == name and self._callback is callback

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # while the other finders are asked
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # whoever asks need not be importing
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(inner=spec.loader, waiter=self, callback=self._callback)
        return spec


class _CallingLoader(Loader):
    """Runs the module's body with the real loader, puts that loader back, then calls back."""

    def __init__(self, *, inner: Loader, waiter: _Waiter, callback: Callback) -> None:
        self._inner = inner
        self._waiter = waiter
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._waiter in sys.meta_path:
            sys.meta_path.remove(self._waiter)  # from here on the import is an ordinary one
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        try:
            self._inner.exec_module(module)
        except BaseException:
            sys.meta_path.insert(0, self._waiter)  # the import failed: wait for the next one
            raise
        self._callback(module)
