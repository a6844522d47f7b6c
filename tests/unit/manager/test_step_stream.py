"""The stream of steps, seen from the manager's end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.executor_client import ExecutorGoneError, ExecutorLostError, StepStream


class Call:
    """An open call on which these messages have come already, and then the end, or what its status is."""

    def __init__(self, messages: Sequence[pb.ExecuteResponse], status: grpc.aio.AioRpcError | None = None) -> None:
        self._messages = [*messages, grpc.aio.EOF]
        self._status = status

    async def read(self) -> Any:
        message = self._messages.pop(0)
        if message is grpc.aio.EOF and self._status is not None:
            raise self._status
        return message

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


async def test_step_stream_end_that_came_with_the_last_result_is_told_after_it() -> None:
    events = asyncio.Event()
    stream = StepStream(Call([pb.ExecuteResponse(step_id=1)]), events.set)
    await asyncio.sleep(0.01)
    events.clear()
    assert [result.step_id for result in stream.take_results()] == [1]
    assert events.is_set(), "nobody would come again"
    with pytest.raises(ExecutorLostError, match="ended the stream"):
        stream.take_results()


@pytest.mark.parametrize(
    ("code", "details", "is_gone"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", True),  # told by grpc.aio, whatever the executor told
        (grpc.StatusCode.INTERNAL, "step 3 failed", False),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", False),
    ],
)
async def test_step_stream_that_ends_under_a_write_blames_no_row(
    code: grpc.StatusCode, details: str, is_gone: bool
) -> None:
    metadata = grpc.aio.Metadata()
    stream = StepStream(Call([], grpc.aio.AioRpcError(code, metadata, metadata, details)), lambda: None)
    await asyncio.sleep(0.01)
    with pytest.raises(ExecutorLostError) as caught:
        stream.take_results()
    assert isinstance(caught.value, ExecutorGoneError) is is_gone
