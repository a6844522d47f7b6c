"""The pure core: block pool, prefix hashes, admission, scheduling, preemption, finish.

It imports no grpc and no torch, reads no clock and opens no file: time and ids are arguments. So the same code serves
live traffic, replays a trace and runs under a deterministic simulation.

The same sources run as they are or compiled by mypyc (`make wheel`), with the same results. Compiled, a class takes no
subclass and no patch from outside.
"""

from __future__ import annotations

from importlib.util import find_spec


def is_compiled() -> bool:
    """Whether the core that an import finds is the compiled one."""
    spec = find_spec("kvmanager_service.core.scheduler")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
