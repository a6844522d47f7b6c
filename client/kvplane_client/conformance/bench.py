"""What a case works with: sequences, streams of steps, and checks of all that comes back.

Station: `runner` makes one `Bench` for each case, on a fresh cache. Every answer is held to the contract as it comes.
Every greedy output is noted with the sequence it stands for, and judged when the case is over.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.judges import Expected, Judge, Output, Tokens, disagreement
from kvplane_client.conformance.outcome import CaseFailedError, CaseSkippedError
from kvplane_client.conformance.steps import (
    Copy,
    Row,
    Sample,
    StepExtras,
    Track,
    build_step,
    floats_of,
    greedy,
    values_of,
)
from kvplane_client.conformance.target import Target, check_error, unexpected

if TYPE_CHECKING:
    from kvplane_client.conformance.steps import Geometry

__all__ = ["Answer", "Bench", "Stream", "ask_alone"]

EPOCH_KEY = "kvplane-kv-epoch"
_NUM_LOGPROBS = 5

_ENDS = "ExecutorService.Execute: A step that cannot be run ends the stream with its status"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Answer:
    """One step's result, checked. outputs: one for each sample."""

    response: pb.ExecuteResponse
    outputs: list[Output]

    @property
    def tokens(self) -> list[int]:
        """The sampled tokens."""
        return [output.token for output in self.outputs]


@dataclass(frozen=True)
class _SentStep:
    """A step that is not answered yet. samples: the row of each and how it is drawn."""

    step_id: int
    rows: Sequence[Row]
    samples: Sequence[tuple[int, Sample]]


class Bench:
    """One case's view of the executor.

    Args:
        target: The executor.
        judge: Says what outputs should be.
        kv_epoch: Of the empty cache.
    """

    def __init__(self, target: Target, judge: Judge, kv_epoch: int) -> None:
        self.target = target
        self.stub = target.stub
        self.info = target.info
        self.judge = judge
        self.epoch = kv_epoch
        self.greedy = Sample(greedy(min(_NUM_LOGPROBS, target.info.max_logprobs)))
        self.noted: list[tuple[Tokens, Output]] = []
        self._streams: list[Stream] = []
        self._unused = list(range(target.geometry.num_blocks))
        random.Random(7).shuffle(self._unused)  # noqa: S311 - the same order everywhere

    @property
    def geometry(self) -> Geometry:
        """The cache's."""
        return self.target.geometry

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.target.geometry.block_size

    def prompt(self, length: int, salt: int = 0) -> list[int]:
        """Tokens that are the same at every call: those of a shorter prompt are the first of a longer one's.

        Raises:
            CaseSkippedError: The model does not take that many, and some to decode.
        """
        if length + 2 * self.block_size > self.info.max_model_len:
            raise CaseSkippedError(f"needs max_model_len {length + 2 * self.block_size}, got {self.info.max_model_len}")
        draw = random.Random(salt)  # noqa: S311 - the same tokens everywhere
        return [draw.randrange(self.info.vocab_size) for _ in range(length)]

    def blocks(self, count: int) -> list[int]:
        """Logical blocks that no other call has given out, in no order."""
        taken, self._unused = self._unused[:count], self._unused[count:]
        assert len(taken) == count, "a case wants more blocks than there are"
        return taken

    def track(self, length: int, salt: int = 0, blocks: list[int] | None = None) -> Track:
        """A sequence of so many tokens, of which none is computed.

        Args:
            length: Its prompt's.
            salt: Which prompt.
            blocks: Where it lies; without any, in such as nobody has. When they are full it takes more of those.
        """
        if blocks is not None:
            self._unused = [block for block in self._unused if block not in blocks]
        prompt = self.prompt(length, salt)
        return Track(prompt, self.blocks(-(-length // self.block_size)) if blocks is None else blocks)

    def beyond_windows(self, salt: int = 0) -> Track:
        """A sequence that has blocks before each window.

        Raises:
            CaseSkippedError: There is no window or chunk, or the model or the cache is too small for such sequences.
        """
        window, length = max(map(abs, self.geometry.windows)), self.target.beyond_windows
        if not window:
            raise CaseSkippedError("needs a KV group with a window or chunks")
        if not length:
            raise CaseSkippedError(
                f"a window or chunk of {window} is too long for max_model_len {self.info.max_model_len}"
            )
        if self.geometry.num_blocks < self.target.blocks_beyond_windows:
            raise CaseSkippedError(
                f"a window or chunk of {window} is too long for {self.target.profile.num_blocks} blocks"
            )
        return self.track(length, salt)

    def stream(self, knows_epoch: int | None = None) -> Stream:
        """Opens an Execute stream. knows_epoch: the epoch that it names when it is opened."""
        metadata = None if knows_epoch is None else ((EPOCH_KEY, str(knows_epoch)),)
        opened = Stream(self, self.stub.Execute(metadata=metadata))
        self._streams.append(opened)
        return opened

    async def tags(self, kv_epoch: int | None = None) -> dict[int, bytes]:
        """Lists the tags, by block as the executor numbers them."""
        found: dict[int, bytes] = {}
        request = pb.ListBlockTagsRequest(kv_epoch=self.epoch if kv_epoch is None else kv_epoch)
        for portion in await self.call(_collected(self.stub.ListBlockTags(request))):
            blocks = self.ints(portion.block_tags.block_ids, "BlockTags.block_ids")
            self.equal(
                len(portion.block_tags.tags), len(blocks), "BlockTags.tags: tags has one entry for each of block_ids"
            )
            twice = set(blocks) & found.keys()
            self.equal(twice, set(), "ListBlockTagsResponse.block_tags: No block is in two portions.")
            found.update(zip(blocks, portion.block_tags.tags, strict=True))
        return found

    def tagged(self, tags: dict[int, bytes]) -> dict[int, bytes]:
        """What `tags` should return for tags of logical blocks."""
        groups = range(self.geometry.num_groups)
        return {self.geometry.physical(block, group): tag for block, tag in tags.items() for group in groups}

    async def cache(self) -> pb.KvCacheState | None:
        """What the executor says of its cache; None without one."""
        info = await self.call(self.stub.GetModelInfo(pb.GetModelInfoRequest()))
        return info.kv_cache if info.HasField("kv_cache") else None

    async def call(self, call: Awaitable[_T]) -> _T:
        """Waits for a good answer; see `Target.call`."""
        return await self.target.call(call)

    async def refused(self, call: Awaitable[object], code: grpc.StatusCode, contract: str, **metadata: object) -> None:
        """Waits for an error; see `Target.refused`."""
        await self.target.refused(call, code, contract, **metadata)

    @staticmethod
    def true(condition: bool, contract: str, expected: object, got: object) -> None:
        """Raises CaseFailedError where a condition does not hold."""
        if not condition:
            raise CaseFailedError(contract, expected, got)

    @classmethod
    def equal(cls, got: object, expected: object, contract: str) -> None:
        """Raises CaseFailedError where two values differ."""
        cls.true(got == expected, contract, expected, got)

    @classmethod
    def ints(cls, array: common_pb2.Int32Array, name: str) -> list[int]:
        """Unpacks a column that came, once it is known to be one."""
        _whole(array.data, "Int32Array.data: Its length is a multiple of 4", name)
        return values_of(array)

    async def unharmed(self, *tracks: Track) -> None:
        """Goes on with sequences on a new stream: what they have in the cache must be what it was."""
        stream = self.stream()
        for track in tracks:
            await stream.decode(track, 2)
        await stream.close()

    def note(self, sequence: Sequence[int], output: Output) -> None:
        """Keeps an output for `judged`."""
        self.noted.append((tuple(sequence), output))

    async def close(self) -> None:
        """Ends what streams are still open."""
        for stream in self._streams:
            stream.cancel()

    async def judged(self, contract: str) -> None:
        """Compares all outputs with what they should have been. The cache may be another then.

        Raises:
            CaseFailedError: The first that is wrong.
        """
        sequences = [sequence for sequence, _ in self.noted]
        for (sequence, output), expected in zip(self.noted, await self.judge.expected(sequences), strict=True):
            found = disagreement(output, expected, self.judge.tolerance)
            if found is not None:
                place = f"after {len(sequence)} tokens"
                raise CaseFailedError(contract, f"{place}: {found[0]} by {self.judge.name}", found[1])


class Stream:
    """An Execute stream; every answer is checked.

    Args:
        bench: The case's.
        call: The open call.
    """

    def __init__(self, bench: Bench, call: grpc.aio.StreamStreamCall[pb.ExecuteRequest, pb.ExecuteResponse]) -> None:
        self._bench = bench
        self._call = call
        self._sent: deque[_SentStep] = deque()
        self._sampled_before: list[int] = []
        self.last_step_id = 0

    def build(
        self,
        *rows: Row,
        feeds: bool = False,
        tags: dict[int, bytes] | None = None,
        copies: Sequence[Copy] = (),
    ) -> pb.ExecuteRequest:
        """Lays out the next step, and takes note of it as the next to be sent.

        Args:
            rows: What it computes.
            feeds: Whether rows are fed from the step before.
            tags: By logical block.
            copies: Logical blocks.
        """
        bench = self._bench
        for row in rows:
            missing = -(-row.end // bench.block_size) - len(row.track.blocks)
            row.track.grow(bench.blocks(max(0, missing)))
        extras = StepExtras(self.last_step_id if feeds else 0, tags or {}, copies)
        self.last_step_id += 1
        samples = [
            (index, one)
            for index, row in enumerate(rows)
            for one in ([bench.greedy] if row.samples is None else row.samples)
        ]
        self._sent.append(_SentStep(self.last_step_id, rows, samples))
        return build_step(bench.geometry, self.last_step_id, bench.epoch, rows, default=bench.greedy, extras=extras)

    async def write(self, request: pb.ExecuteRequest) -> None:
        """Sends a step as it is. On a stream that has ended it does nothing: the reader is told."""
        try:
            async with asyncio.timeout(self._bench.target.answer_within):
                await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except TimeoutError:
            raise self._bench.target.too_late() from None

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
                "ExecutorService.Execute: Execute runs steps in the order sent, one response a step.",
                f"an answer to step {self._sent[0].step_id}",
                "the end of the stream with OK",
            )
        return self._take(response)

    def _take(self, response: pb.ExecuteResponse) -> Answer:
        """Checks an answer and takes note of what it says."""
        sent = self._sent.popleft()
        answer = self._checked(sent, response)
        self._fill_in(sent)
        for (index, sample), output in zip(sent.samples, answer.outputs, strict=True):
            row = sent.rows[index]
            if sample is self._bench.greedy:
                self._bench.note(row.track.tokens[: row.end], output)
        self._sampled_before = answer.tokens
        return answer

    async def error(self, code: grpc.StatusCode, contract: str, **metadata: object) -> None:
        """Waits for the stream to end with an error, without an answer before."""
        try:
            async with asyncio.timeout(self._bench.target.answer_within):
                response = await self._call.read()
                if isinstance(response, pb.ExecuteResponse):
                    raise CaseFailedError(contract, code.name, f"an answer to step {response.step_id}")
                status = await self._call.code()
        except grpc.aio.AioRpcError as error:
            check_error(error, code, contract, metadata)
        except TimeoutError:
            raise self._bench.target.too_late(contract, code.name) from None
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
        answers, error = await asyncio.to_thread(self._bench.target.exchange, requests)
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
        contract = "ExecutorService.Execute: Execute runs steps in the order sent, one response a step."
        response = await self._read()
        if response is not None:
            raise CaseFailedError(contract, "the end of the stream", f"one more answer, to step {response.step_id}")

    def cancel(self) -> None:
        """Goes away without a word."""
        self._call.cancel()

    async def _read(self) -> pb.ExecuteResponse | None:
        """The next answer, None at a good end."""
        try:
            async with asyncio.timeout(self._bench.target.answer_within):
                response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise unexpected(error) from error
        except TimeoutError:
            raise self._bench.target.too_late() from None
        return response if isinstance(response, pb.ExecuteResponse) else None

    def _fill_in(self, sent: _SentStep) -> None:
        """Writes down the tokens that rows of a step were fed."""
        for row in sent.rows:
            if row.feed >= 0:
                del row.track.tokens[row.end - 1 :]
                row.track.tokens.append(self._sampled_before[row.feed])

    def _checked(self, sent: _SentStep, response: pb.ExecuteResponse) -> Answer:
        """Holds an answer to what the contract says of any."""
        bench = self._bench
        bench.equal(
            response.step_id,
            sent.step_id,
            "ExecutorService.Execute: Execute runs steps in the order sent, one response a step.",
        )
        bench.equal(response.kv_epoch, bench.epoch, "ExecuteResponse.kv_epoch: kv_epoch is the executor's.")
        bench.equal(
            [error.reason for error in response.row_errors],
            [],
            "ExecuteResponse.row_errors: row_errors are rows that failed alone, such as non-finite logits; the others "
            "are good.",
        )
        contract = (
            "ExecuteResponse.sampled_token_ids: sampled_token_ids has S values, in the order of SamplingBatch.rows"
        )
        tokens = bench.ints(response.sampled_token_ids, "sampled_token_ids")
        bench.equal(len(tokens), len(sent.samples), contract)
        good = all(0 <= token < bench.info.vocab_size for token in tokens)
        bench.true(good, contract, f"ids in [0, {bench.info.vocab_size})", tokens)
        bench.equal(
            bench.ints(response.computed_upto, "computed_upto"),
            [row.end for row in sent.rows],
            "ExecuteResponse.computed_upto: computed_upto has R values: how many tokens of the row's sequence have K/V "
            "in the cache now.",
        )
        return Answer(response, self._outputs(sent, response, tokens))

    def _outputs(self, sent: _SentStep, response: pb.ExecuteResponse, tokens: list[int]) -> list[Output]:
        """Puts tokens and log probabilities together."""
        bench = self._bench
        wanted = [sample.params.num_logprobs + 1 for _, sample in sent.samples]
        if not any(wanted):
            return [Output(token, ()) for token in tokens]
        message = response.logprobs
        _whole(message.logprobs.data, "Float32Array.data: Its length is a multiple of 4", "logprobs")
        ids, values = bench.ints(message.token_ids, "logprobs.token_ids"), floats_of(message.logprobs)
        borders = [sum(wanted[:place]) for place in range(len(wanted) + 1)]
        contract = (
            "LogprobsBatch.indptr: indptr has S + 1 values: the entries of sampling row s are indptr[s] to "
            "indptr[s + 1]."
        )
        bench.equal(bench.ints(message.indptr, "logprobs.indptr"), borders, contract)
        sizes = (len(ids), len(values))
        bench.equal(
            sizes, (borders[-1], borders[-1]), "LogprobsBatch.token_ids: token_ids has one value for each entry."
        )
        outputs = []
        for token, start, end in zip(tokens, borders, borders[1:], strict=False):
            entries = tuple(zip(ids[start:end], values[start:end], strict=True))
            likeliest = [value for _, value in entries[1:]]
            in_order = not entries or (entries[0][0] == token and likeliest == sorted(likeliest, reverse=True))
            bench.true(
                in_order,
                "LogprobsBatch.indptr: None, or the produced token first and then the likeliest ones, likeliest first.",
                f"token {token}, then others by falling log probability",
                entries,
            )
            outputs.append(Output(token, entries))
        return outputs


def ask_alone(target: Target) -> Callable[[Sequence[Tokens]], Awaitable[list[Output]]]:
    """Returns what `SelfJudge` asks with."""

    async def ask(sequences: Sequence[Tokens]) -> list[Output]:
        outputs: list[Output] = []
        queue = deque(sequences)
        while queue:
            async with _empty(target) as bench:
                stream, first_free = bench.stream(), 0
                while queue:
                    count = -(-len(queue[0]) // bench.block_size)
                    if first_free + count > bench.geometry.num_blocks:
                        break
                    track = Track(list(queue.popleft()), list(range(first_free, first_free + count)))
                    first_free += count
                    outputs.append((await stream.step(track.next())).outputs[0])
        return outputs

    return ask


@asynccontextmanager
async def _empty(target: Target) -> AsyncIterator[Bench]:
    """A bench whose outputs nobody judges."""
    bench = Bench(target, _Nobody(), await target.fresh())
    try:
        yield bench
    finally:
        await bench.close()


class _Nobody(Judge):
    """Stands where no output is judged."""

    name = "nobody"
    tolerance = 0.0

    async def expected(self, sequences: Sequence[Tokens]) -> list[Expected]:
        raise AssertionError(f"an output of {len(sequences)} sequences was handed to nobody to judge")


async def _collected(call: Any) -> list[pb.ListBlockTagsResponse]:
    return [portion async for portion in call]


def _whole(data: bytes, contract: str, name: str) -> None:
    if len(data) % 4:
        raise CaseFailedError(contract, f"a multiple of 4 bytes in {name}", len(data))
