"""Who may call what: a key for everybody, before a servicer or a message is looked at.

Station: `server` gives it to grpc, outermost, which asks it once a call. It decides by method and key alone; whose a
request is decides `callers`.

Open to everybody are health, which probes ask that hold no key, and reflection, which tells what is public anyway: the
contract. A method that is in no table below is for operators.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from kvplane.kvmanager.v1 import executor_registry_service_pb2, inference_service_pb2, kv_manager_service_pb2

from kvmanager_service.api_keys import KeyRing
from kvmanager_service.callers import Caller, Role, set_caller
from kvmanager_service.core.errors import CoreError
from kvmanager_service.errors import PermissionDeniedError, UnauthenticatedError, abort_with

__all__ = ["Authentication"]

_log = structlog.get_logger(__name__)

_Handler = grpc.RpcMethodHandler
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["_Handler[Any, Any] | None"]]

_HEADER = "authorization"
_SCHEME = "bearer"
_HOW = "send metadata `authorization: Bearer KEY` (kvplane: KVPLANE_API_KEY or --api-key-file)"


def _methods(module: Any, service: str, *names: str) -> list[str]:
    """Paths of methods as calls name them; a name that the contract does not have is a KeyError."""
    descriptor = module.DESCRIPTOR.services_by_name[service]
    return [f"/{descriptor.full_name}/{descriptor.methods_by_name[name].name}" for name in names]


_OPEN = frozenset(
    _methods(health_pb2, "Health", *health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name)
    + _methods(reflection_pb2, "ServerReflection", "ServerReflectionInfo")
)
_OPERATORS = frozenset((Role.OPERATOR,))
_ROLES: dict[str, frozenset[Role]] = (
    dict.fromkeys(
        _methods(
            inference_service_pb2, "InferenceService", "Generate", "GenerateMany", "Abort", "GetModel", "GetContract"
        )
        + _methods(kv_manager_service_pb2, "KvManagerService", "ListRequests"),
        frozenset((Role.TENANT, Role.OPERATOR)),
    )
    # Who registers is sent prompts. So not even operators do.
    | dict.fromkeys(
        _methods(executor_registry_service_pb2, "ExecutorRegistryService", "Register"), frozenset((Role.EXECUTOR,))
    )
    | dict.fromkeys(
        _methods(executor_registry_service_pb2, "ExecutorRegistryService", "ListExecutors"),
        frozenset((Role.EXECUTOR, Role.OPERATOR)),
    )
)


class Authentication(grpc.aio.ServerInterceptor):
    """Ends a call without a key UNAUTHENTICATED, and one whose key is for other methods PERMISSION_DENIED.

    Attributes:
        keys: may be replaced at any time; a call that has begun keeps the name it began with.
    """

    def __init__(self, keys: KeyRing) -> None:
        self.keys = keys

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler[Any, Any] | None:
        """Return the method's handler, or one that refuses the call."""
        method = handler_call_details.method
        if method not in _OPEN:
            try:
                caller = self._caller(handler_call_details)
                _check_role(caller, method)
            except CoreError as error:
                _log.debug("call_refused", method=method, reason=error.reason, caller=error.metadata.get("caller"))
                return _refusal(error)
            set_caller(caller)
        return await continuation(handler_call_details)

    def _caller(self, details: grpc.HandlerCallDetails) -> Caller:
        """Return whose key comes with a call. Raises UnauthenticatedError."""
        values = [value for name, value in details.invocation_metadata or () if name == _HEADER]
        if not values:
            raise UnauthenticatedError("MISSING_KEY", f"expected a key, got none; {_HOW}")
        scheme, _, key = str(values[0]).partition(" ")
        if len(values) > 1 or scheme.lower() != _SCHEME or not key:
            raise UnauthenticatedError("MISSING_KEY", f"expected one key as a bearer token, got another form; {_HOW}")
        caller = self.keys.caller(key.strip())
        if caller is None:
            raise UnauthenticatedError(
                "UNKNOWN_KEY",
                "expected a key that the manager knows, got another; check the client's key. One that is new in the"
                " manager's --api-keys file counts from its next SIGHUP, or start, on",
            )
        return caller


def _check_role(caller: Caller, method: str) -> None:
    allowed = _ROLES.get(method, _OPERATORS)
    if caller.role not in allowed:
        expected = " or ".join(sorted(role.value for role in allowed))
        raise PermissionDeniedError(
            "METHOD_FORBIDDEN",
            f"{method}: expected the key of an {expected}, got that of {caller.role.value} {caller.name!r}; use such"
            " a key",
            method=method,
            role=caller.role.value,
            caller=caller.name,
        )


def _refusal(error: CoreError) -> _Handler[Any, Any]:
    """Make a handler that ends the call at once. It reads no message, so it does for methods of every kind."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
