"""What the manager knows of the contract, asked before a request says what must not be ignored.

Station: owned by ``AsyncClient``; whoever starts an attempt has its request checked here. A manager ignores fields from
after its time, as every server of proto3 does. Where that would let requests share K/V that must not, or mix up whose
output is whose, the contract marks the field (``known_since``), and nothing is sent.

One that a manager knows is asked for once a connection, and only by requests that have such a field: a manager that is
replaced by an older one breaks the connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvplane_client._stubs import Stubs
from kvplane_client.errors import ManagerTooOldError, error_from_rpc

__all__ = ["ManagerContract", "marked_fields"]

_METHOD_FORBIDDEN = "METHOD_FORBIDDEN"
_Marks: TypeAlias = dict[str, tuple[int, bool]]
"""Of a message type, by field: its ``known_since``, and whether its own message has marks. Others are not in it."""


class ManagerContract:
    """The version of the contract that the manager behind a channel has.

    Args:
        stubs: Where to ask.
    """

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs
        self._version: int | None = None

    async def require(self, request: Message, timeout: float | None) -> None:  # noqa: ASYNC109 - of the call within
        """Returns if the manager knows all that must not be ignored of a request. To be called before each attempt.

        Args:
            request: What is to be sent.
            timeout: Seconds that asking may take; None sets no limit.

        Raises:
            ManagerTooOldError: It does not.
            grpc.aio.AioRpcError: The manager could not be asked.
        """
        if self._version is not None and self._stubs.channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._version = None  # who answers next may be another
        marked = dict(marked_fields(request))
        if not marked:
            return
        if self._version is None:
            self._version = await self._ask(timeout)
        unknown = {path: since for path, since in marked.items() if since > self._version}
        if unknown:
            raise _too_old(unknown, self._version)

    async def _ask(self, timeout: float | None) -> int:  # noqa: ASYNC109 - of the call within
        try:
            answer = await self._stubs.inference.GetContract(pb.GetContractRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as rpc_error:
            # From before the method. The second where it has --api-keys: no tenant may call what it does not know.
            is_unknown = rpc_error.code() is grpc.StatusCode.UNIMPLEMENTED
            if is_unknown or error_from_rpc(rpc_error).reason == _METHOD_FORBIDDEN:
                return 0
            raise
        return answer.contract_version


def marked_fields(message: Message) -> Iterator[tuple[str, int]]:
    """The fields of a message, and of those in it, that are set and must not be ignored.

    Returns:
        Path, as ``operations.open.tenant``, and contract version of each; a path that is met several times comes as
        often.
    """
    marks = _marks(message.DESCRIPTOR)
    if not marks:
        return
    for field, value in message.ListFields():
        since, has_below = marks.get(field.name, (0, False))
        if since:
            yield field.name, since
        if has_below:
            for part in (value,) if isinstance(value, Message) else value:
                yield from ((f"{field.name}.{path}", below) for path, below in marked_fields(part))


@cache
def _marks(descriptor: Descriptor) -> _Marks:
    marks: _Marks = {}
    for field in descriptor.fields:
        since = field.GetOptions().Extensions[common_pb2.known_since]
        has_below = field.type == FieldDescriptor.TYPE_MESSAGE and bool(_marks(field.message_type))
        if since or has_below:
            marks[field.name] = since, has_below
    return marks


def _too_old(unknown: dict[str, int], version: int) -> ManagerTooOldError:
    names, needed = ", ".join(unknown), max(unknown.values())
    told = f"version {version}" if version else "version 0 (it is from before versions were told)"
    return ManagerTooOldError(
        f"{names}: expected a manager of contract version {needed} or newer, since an older one ignores it and would"
        f" mix up what must be kept apart, got {told}; upgrade the manager, or send the request without",
        reason="MANAGER_TOO_OLD",
        metadata={"fields": names, "expected": str(needed), "got": str(version)},
    )
