"""What the manager knows of the contract, asked before a request says what must not be ignored.

Station: owned by ``AsyncClient``; whoever starts an attempt has its request checked here. A manager ignores fields from
after its time, as every server of proto3 does. Where that would let requests share K/V that must not, or mix up whose
output is whose, the contract marks the field (``known_since``), and nothing is sent.

What a manager knows is asked for once a connection, however many requests wait for the answer, and only by requests
that have such a field: a manager that is replaced by an older one breaks the connection. That it broke is seen when the
next call is made, since no channel connects anew but for a call: whoever makes one has it noted first.
"""

from __future__ import annotations

import asyncio
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
from kvplane_client.errors import DeadlineExceededError, ManagerTooOldError, error_from_rpc
from kvplane_client.retry import Deadline

__all__ = ["ManagerContract", "marked_fields"]

_METHOD_FORBIDDEN = "METHOD_FORBIDDEN"
_TENANT = "tenant"
_Marks: TypeAlias = dict[str, tuple[int, bool]]
"""Of a message type, by field: its ``known_since``, and whether its own message has marks. Others are not in it."""


class ManagerContract:
    """The version of the contract that the manager behind a channel has.

    Args:
        stubs: Where to ask.
    """

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs
        self._question: _Question | None = None

    def note_connection(self) -> None:
        """Forgets the answer of a connection that is no more. To be called before each call, and with what is sent."""
        if self._question is None or self._question.version is None:
            return
        if self._stubs.channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._question = None  # who answers next may be another

    def allows(self, request: Message) -> bool:
        """Whether a request may be sent, without asking: False means that ``require`` would have to ask.

        Raises:
            ManagerTooOldError: It may not.
        """
        self.note_connection()
        marked = dict(marked_fields(request))
        if not marked:
            return True
        version = None if self._question is None else self._question.version
        if version is None:
            return False
        _check(marked, version)
        return True

    async def require(self, request: Message, timeout: float | None) -> None:  # noqa: ASYNC109 - of the call within
        """Returns if the manager knows all that must not be ignored of a request. To be called before each attempt.

        Args:
            request: What is to be sent.
            timeout: Seconds that asking may take; None sets no limit.

        Raises:
            ManagerTooOldError: It does not.
            DeadlineExceededError: It did not say in time.
            grpc.aio.AioRpcError: The manager could not be asked.
        """
        deadline = Deadline(timeout)
        while not self.allows(request):
            await self._answer(deadline)

    async def _answer(self, deadline: Deadline) -> None:
        """Waits for the answer of the connection as it is. It may be another's by the time it is read."""
        question = self._question
        if question is None:
            question = self._question = _Question(self._stubs)
        try:
            await question.wait(deadline)
        finally:
            if self._question is question and question.is_in_vain:
                self._question = None  # the next one asks anew


class _Question:
    """GetContract of one connection, asked for all who wait for the answer, and given up when nobody does any more.

    Args:
        stubs: Where to ask.

    Attributes:
        version: The answer; None until there is one.
    """

    def __init__(self, stubs: Stubs) -> None:
        self.version: int | None = None
        self._num_waiting = 0
        self._task = asyncio.create_task(self._ask(stubs), name="kvplane-contract")

    @property
    def is_in_vain(self) -> bool:
        """Whether it will have no answer: it failed, or was given up."""
        return self.version is None and (self._task.done() or not self._num_waiting)

    async def wait(self, deadline: Deadline) -> None:
        """Returns when there is an answer.

        Raises:
            DeadlineExceededError: It did not come in time.
            grpc.aio.AioRpcError: None will come.
        """
        self._num_waiting += 1
        try:
            await asyncio.wait({self._task}, timeout=deadline.remaining())
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._task.cancel()
        if not self._task.done():
            raise DeadlineExceededError("the deadline passed before the manager said which contract it has")
        self._task.result()

    async def _ask(self, stubs: Stubs) -> None:
        try:
            answer = await stubs.inference.GetContract(pb.GetContractRequest())
        except grpc.aio.AioRpcError as rpc_error:
            if not _is_of_before(rpc_error):
                raise
            self.version = 0
        else:
            self.version = answer.contract_version


def _is_of_before(rpc_error: grpc.aio.AioRpcError) -> bool:
    """Whether a manager refused GetContract as one from before the method does.

    Where it has --api-keys, what it does not know is for operators, so it says to tenants that they may not.
    """
    if rpc_error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return True
    error = error_from_rpc(rpc_error)
    return error.reason == _METHOD_FORBIDDEN and error.metadata.get("role") == _TENANT


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


def _check(marked: dict[str, int], version: int) -> None:
    unknown = {path: since for path, since in marked.items() if since > version}
    if unknown:
        raise _too_old(unknown, version)


def _too_old(unknown: dict[str, int], version: int) -> ManagerTooOldError:
    names, needed = ", ".join(unknown), max(unknown.values())
    told = f"version {version}" if version else "version 0 (it is from before versions were told)"
    return ManagerTooOldError(
        f"{names}: expected a manager of contract version {needed} or newer, since an older one ignores it and would"
        f" mix up what must be kept apart, got {told}; upgrade the manager, or send the request without",
        reason="MANAGER_TOO_OLD",
        metadata={"fields": names, "expected": str(needed), "got": str(version)},
    )
