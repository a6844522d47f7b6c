"""Requests whose bytes are not the message that the method takes.

Station: `server` gives it to grpc, which asks it for each call's method. It knows no service.

grpc.aio has no place for this: what a deserializer raises before a method is called ends the call UNKNOWN, with a
traceback in the log for anybody's three bytes. So a method of one request is called only once that is known to be a
message, and a method that reads a stream finds the error where it reads.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from executor_service.errors import MalformedMessageError, abort_with

__all__ = ["MalformedRequests"]

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]
_Parse = Callable[[bytes], Any]

_MAKERS: dict[tuple[bool, bool], Callable[[Any, _Parse, Any], _Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether the request, and the response, is a stream."""


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Ends a call whose request is no message with INVALID_ARGUMENT and the reason MALFORMED_MESSAGE."""

    def __init__(self) -> None:
        self._checked: dict[str, _Handler] = {}

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Return the method's handler, made to check its requests; None where there is no such method."""
        method = handler_call_details.method
        if method not in self._checked:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._checked[method] = _check(handler)
        return self._checked[method]


def _check(handler: _Handler) -> _Handler:
    """Make a handler that checks its requests. What is not asynchronous is what a service has not implemented."""
    parse, serialize = handler.request_deserializer, handler.response_serializer
    method: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    is_generator = inspect.isasyncgenfunction(method)
    if parse is None or not (is_generator or inspect.iscoroutinefunction(method)):
        return handler
    if handler.request_streaming:
        parse = _or_raise(parse)
    else:
        parse = _or_error(parse)
        method = _generator(method) if is_generator else _coroutine(method)
    return _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)](method, parse, serialize)


def _coroutine(method: Callable[[Any, _Context], Awaitable[Any]]) -> Callable[[Any, _Context], Awaitable[Any]]:
    async def checked(request: Any, context: _Context) -> Any:
        if isinstance(request, MalformedMessageError):
            await abort_with(context, request)
        return await method(request, context)

    return checked


def _generator(method: Callable[[Any, _Context], Any]) -> Callable[[Any, _Context], AsyncIterator[Any]]:
    async def checked(request: Any, context: _Context) -> AsyncIterator[Any]:
        if isinstance(request, MalformedMessageError):
            await abort_with(context, request)
        async with aclosing(method(request, context)) as responses:
            async for response in responses:
                yield response

    return checked


def _or_raise(parse: _Parse) -> _Parse:
    def checked(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise _malformed(data, error) from error

    return checked


def _or_error(parse: _Parse) -> _Parse:
    def checked(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return _malformed(data, error)

    return checked


def _malformed(data: bytes, error: DecodeError) -> MalformedMessageError:
    return MalformedMessageError(
        "MALFORMED_MESSAGE",
        f"expected the method's request message, got {len(data)} bytes that are none ({error}); use stubs of the same"
        " contract",
        got_bytes=len(data),
    )
