"""The client of KVPlane: generate text, look into the KV manager, run a server from the command line.

Start with :class:`AsyncClient` or :class:`Client`. Errors are described in :mod:`kvplane_client.errors`. The package
speaks to the manager over the wire alone and imports neither service.

What it exports is in ``_public``, and imported once a name of it is asked for (PEP 562): the command has to run before
gRPC is imported, to end quietly when it is interrupted while that takes its time.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplane_client._public import *  # noqa: F403 - its __all__
    from kvplane_client._public import __all__ as __all__

_NOT_THERE = object()


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:  # a module of the package
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}._public"), name, _NOT_THERE)
    if value is _NOT_THERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("kvplane_client._public").__all__})
