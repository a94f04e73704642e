"""A global name of vLLM that stands for a class or function of ours while one call runs.

vLLM builds some parts by a global name and has no factory for them. Only the thread that asked gets
ours meanwhile: engines may be built and run in several threads of one process, paged ones too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm_tagma.errors import SeamError

# Of all names: held while vLLM builds one engine's part or updates one step's requests, which takes
# milliseconds. Re-entrant, as a part that is built may build another.
_lock = threading.RLock()


@contextmanager
def name_stands_for(
    module: ModuleType, name: str, stock: Callable[..., Any], build: Callable[..., Any]
) -> Iterator[None]:
    """Inside, calls of ``module.name`` by this thread go to ``build``, by others to ``stock``.

    Raises ``SeamError`` if the name does not stand for ``stock``; nothing is changed then.
    """
    ours = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (build if threading.get_ident() == ours else stock)(*args, **kwargs)

    with _lock:
        found = getattr(module, name)
        if found is not stock:
            raise SeamError(
                f"{module.__name__}.{name} is {found!r}, not vLLM's own: another plugin replaced "
                "it. Disable it with VLLM_PLUGINS or use --kv-cache-backend paged."
            )
        setattr(module, name, chosen)
        try:
            yield
        finally:
            setattr(module, name, stock)
