"""Who calls, and whose requests are theirs: the name that a key stands for.

Station: `authentication` says once a call who makes it; admission, pinning and the servicers ask. A call's tasks
inherit it (a context variable), so no method passes it on. Without --api-keys nobody has a name, and a request's tenant
is what it says.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass

from kvmanager_service.errors import PermissionDeniedError

__all__ = ["Caller", "Role", "own_tenant", "set_caller", "tenant_of_request"]


class Role(enum.Enum):
    """What a key is for."""

    TENANT = "tenant"
    OPERATOR = "operator"
    EXECUTOR = "executor"


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key. No two have one name, whatever their roles."""

    name: str
    role: Role


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def set_caller(caller: Caller) -> None:
    """Name who makes the call that the current task serves."""
    _caller.set(caller)


def tenant_of_request(named: str) -> str:
    """Return whose a request is that names this tenant; empty names none.

    Raises:
        PermissionDeniedError: the caller is a tenant, and names another.
    """
    caller = _caller.get()
    if caller is None:
        return named
    if not named:
        return caller.name
    if named != caller.name and caller.role is not Role.OPERATOR:
        raise PermissionDeniedError(
            "TENANT_FORBIDDEN",
            f"tenant: expected {caller.name!r}, which the key is of, or none, got {named!r}; leave it out, or use an"
            " operator's key to speak for others",
            field="tenant",
            caller=caller.name,
        )
    return named


def own_tenant() -> str | None:
    """Return the tenant of whose requests alone the caller may know; None means of all."""
    caller = _caller.get()
    return caller.name if caller is not None and caller.role is Role.TENANT else None
