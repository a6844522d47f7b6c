"""The stream of steps, seen from the manager's end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.executor_client import ExecutorLostError, StepStream


class Call:
    """An open call on which these messages have come already, and then the end."""

    def __init__(self, messages: Sequence[pb.ExecuteResponse]) -> None:
        self._messages = [*messages, grpc.aio.EOF]

    async def read(self) -> Any:
        return self._messages.pop(0)

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
