"""An Execute stream as cases use it: steps go out, each answer is checked as it comes.

Station: opened by `bench`. What is sent is laid out by `steps`, what comes is checked by `answers` and written down in
the case's `notebook`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import grpc
import grpc.aio
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.answers import Answer, SentStep, checked_answer
from kvplane_client.conformance.notebook import Notebook
from kvplane_client.conformance.outcome import CaseFailedError
from kvplane_client.conformance.steps import Copy, Row, StepExtras, Track, build_step
from kvplane_client.conformance.target import check_error, unexpected

__all__ = ["Stream"]

_ORDER = "ExecutorService.Execute: Execute runs steps in the order sent, one response a step."
_ENDS = "ExecutorService.Execute: A step that cannot be run ends the stream with its status"


class Stream:
    """An Execute stream; every answer is checked.

    Args:
        notebook: The case's.
        call: The open call.
    """

    def __init__(
        self, notebook: Notebook, call: grpc.aio.StreamStreamCall[pb.ExecuteRequest, pb.ExecuteResponse]
    ) -> None:
        self._notes = notebook
        self._call = call
        self._sent: deque[SentStep] = deque()
        self._sampled_before: list[int] = []
        self.last_step_id = 0

    def build(
        self,
        *rows: Row,
        feeds: bool = False,
        tags: dict[int, bytes] | None = None,
        copies: Sequence[Copy] = (),
        fails: Collection[int] = (),
    ) -> pb.ExecuteRequest:
        """Lays out the next step, and takes note of it as the next to be sent.

        Args:
            rows: What it computes.
            feeds: Whether rows are fed from the step before.
            tags: By logical block.
            copies: Logical blocks.
            fails: The rows that cannot but fail.
        """
        notes, geometry = self._notes, self._notes.target.geometry
        for row in rows:
            missing = -(-row.end // geometry.block_size) - len(row.track.blocks)
            row.track.grow(notes.blocks(max(0, missing)))
        extras = StepExtras(self.last_step_id if feeds else 0, tags or {}, copies)
        self.last_step_id += 1
        samples = [
            (index, one)
            for index, row in enumerate(rows)
            for one in ([notes.greedy] if row.samples is None else row.samples)
        ]
        self._sent.append(SentStep(self.last_step_id, rows, samples, frozenset(fails)))
        return build_step(geometry, self.last_step_id, notes.epoch, rows, default=notes.greedy, extras=extras)

    async def write(self, request: pb.ExecuteRequest) -> None:
        """Sends a step as it is. On a stream that has ended it does nothing: the reader is told."""
        try:
            async with asyncio.timeout(self._notes.target.answer_within):
                await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except TimeoutError:
            raise self._notes.target.too_late() from None

    async def send(self, *rows: Row, **extras: Any) -> None:
        """Builds and sends a step; `receive` has its answer."""
        await self.write(self.build(*rows, **extras))

    async def step(self, *rows: Row, **extras: Any) -> Answer:
        """Sends a step and waits for its answer."""
        await self.send(*rows, **extras)
        return await self.receive()

    async def prefill(self, track: Track, **extras: Any) -> None:
        """Computes all tokens of a sequence that are known, and learns the next."""
        answer = await self.step(track.next(), **extras)
        track.tokens.append(answer.tokens[0])

    async def together(self, *tracks: Track, copies: Sequence[Copy] = ()) -> None:
        """The same for several sequences in one step."""
        answer = await self.step(*(track.next() for track in tracks), copies=copies)
        for track, token in zip(tracks, answer.tokens, strict=True):
            track.tokens.append(token)

    async def decode(self, track: Track, count: int) -> None:
        """Goes on with a sequence whose last token is not computed, token by token."""
        for _ in range(count):
            await self.prefill(track)

    async def receive(self) -> Answer:
        """Waits for the answer of the step sent first among those not answered.

        Raises:
            CaseFailedError: It breaks the contract, or the stream ends.
        """
        response = await self._read()
        if response is None:
            raise CaseFailedError(
                _ORDER,
                f"an answer to step {self._sent[0].step_id}",
                "the end of the stream with OK",
            )
        return self._take(response)

    async def receive_unless(self, code: grpc.StatusCode, contract: str) -> Answer | None:
        """The same of a step that may end the stream with this error; None where it does."""
        try:
            return await self.receive()
        except CaseFailedError as failure:
            if not isinstance(failure.__cause__, grpc.aio.AioRpcError):
                raise
            check_error(failure.__cause__, code, contract, {})
            return None

    def _take(self, response: pb.ExecuteResponse) -> Answer:
        """Checks an answer and takes note of what it says."""
        sent = self._sent.popleft()
        notes = self._notes
        vocab_size = notes.target.info.vocab_size
        answer = checked_answer(sent, response, kv_epoch=notes.epoch, vocab_size=vocab_size)
        self._fill_in(sent)
        for (index, sample), output in zip(sent.samples, answer.outputs, strict=True):
            if sample is notes.greedy and index not in sent.fails:
                notes.note(sent.rows[index], output)
        self._sampled_before = answer.tokens
        return answer

    async def error(self, code: grpc.StatusCode, contract: str, **metadata: object) -> None:
        """Waits for the stream to end with an error, without an answer before."""
        try:
            async with asyncio.timeout(self._notes.target.answer_within):
                response = await self._call.read()
                if isinstance(response, pb.ExecuteResponse):
                    raise CaseFailedError(contract, code.name, f"an answer to step {response.step_id}")
                status = await self._call.code()
        except grpc.aio.AioRpcError as error:
            check_error(error, code, contract, metadata)
        except TimeoutError:
            raise self._notes.target.too_late(contract, code.name) from None
        else:
            raise CaseFailedError(contract, code.name, f"the end of the stream with {status.name}")

    async def exchange(self, requests: Sequence[pb.ExecuteRequest]) -> grpc.RpcError:
        """Sends steps at once on a call of its own, as which this stream goes on, and waits for its end.

        For steps behind one that ends the stream: where a write fails, `grpc.aio` puts its own error in the place of
        the one that comes. Answers are held to the contract as ever.

        Raises:
            CaseFailedError: It ends well.
        """
        self.cancel()
        answers, error = await asyncio.to_thread(self._notes.target.exchange, requests)
        for response in answers:
            self._take(response)
        if error is None:
            raise CaseFailedError(_ENDS, "the end of the stream with an error", "its end with OK")
        return error

    async def finish_sending(self) -> None:
        """Closes this side; answers still come."""
        await self._call.done_writing()

    async def close(self) -> None:
        """Closes this side and waits for the good end of the other."""
        await self.finish_sending()
        response = await self._read()
        if response is not None:
            raise CaseFailedError(_ORDER, "the end of the stream", f"one more answer, to step {response.step_id}")

    def cancel(self) -> None:
        """Goes away without a word."""
        self._call.cancel()

    async def _read(self) -> pb.ExecuteResponse | None:
        """The next answer, None at a good end."""
        try:
            async with asyncio.timeout(self._notes.target.answer_within):
                response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise unexpected(error) from error
        except TimeoutError:
            raise self._notes.target.too_late() from None
        return response if isinstance(response, pb.ExecuteResponse) else None

    def _fill_in(self, sent: SentStep) -> None:
        """Writes down the tokens that rows of a step were fed."""
        for row in sent.rows:
            if row.feed >= 0:
                del row.track.tokens[row.end - 1 :]
                row.track.tokens.append(self._sampled_before[row.feed])
