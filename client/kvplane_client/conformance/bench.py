"""What a case works with: sequences, streams of steps, and checks of all that comes back.

Station: `runner` makes one `Bench` for each case, on a fresh cache. A `Stream` holds every answer to the contract as it
comes, and notes every greedy output with the sequence it stands for; those are judged when the case is over.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance import checks
from kvplane_client.conformance.judges import Judge, disagreement
from kvplane_client.conformance.notebook import Notebook
from kvplane_client.conformance.outcome import CaseFailedError, CaseSkippedError
from kvplane_client.conformance.steps import Adapter, Track
from kvplane_client.conformance.stream import Stream
from kvplane_client.conformance.target import Target

if TYPE_CHECKING:
    from kvplane_client.conformance.adapter_sources import AdapterSources
    from kvplane_client.conformance.steps import Geometry, Sample

__all__ = ["Bench", "Stream"]

EPOCH_KEY = "kvplane-kv-epoch"

_T = TypeVar("_T")


class Bench:
    """One case's view of the executor.

    Args:
        target: The executor.
        judge: Says what outputs should be.
        sources: Where it finds adapters.
        kv_epoch: Of the empty cache.
    """

    def __init__(self, target: Target, judge: Judge, sources: AdapterSources, kv_epoch: int) -> None:
        self.target = target
        self.stub = target.stub
        self.info = target.info
        self.judge = judge
        self.sources = sources
        self._notes = Notebook(target, kv_epoch)
        self._streams: list[Stream] = []

    @property
    def epoch(self) -> int:
        """Of the cache; a case that has another made says so."""
        return self._notes.epoch

    @epoch.setter
    def epoch(self, kv_epoch: int) -> None:
        self._notes.epoch = kv_epoch

    @property
    def greedy(self) -> Sample:
        """How rows sample that do not say."""
        return self._notes.greedy

    @property
    def geometry(self) -> Geometry:
        """The cache's."""
        return self.target.geometry

    @property
    def block_size(self) -> int:
        """Tokens per logical block."""
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
        return self._notes.blocks(count)

    def track(
        self, length: int, salt: int = 0, blocks: list[int] | None = None, adapter: Adapter | None = None
    ) -> Track:
        """A sequence of so many tokens, of which none is computed.

        Args:
            length: Its prompt's.
            salt: Which prompt.
            blocks: Where it lies; without any, in such as nobody has. When they are full it takes more of those.
            adapter: What it is computed with.
        """
        if blocks is not None:
            self._notes.take(blocks)
        prompt = self.prompt(length, salt)
        own = self.blocks(-(-length // self.block_size)) if blocks is None else blocks
        return Track(prompt, own, adapter=adapter)

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
        opened = Stream(self._notes, self.stub.Execute(metadata=metadata))
        self._streams.append(opened)
        return opened

    async def tags(self, kv_epoch: int | None = None) -> dict[int, bytes]:
        """Lists the tags, by block as the executor numbers them."""
        found: dict[int, bytes] = {}
        request = pb.ListBlockTagsRequest(
            kv_epoch=self.epoch if kv_epoch is None else kv_epoch, knows_group_block_sizes=True
        )
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
        return {
            piece: tag
            for block, tag in tags.items()
            for group in groups
            for piece in self.geometry.pieces(block, group)
        }

    async def cache(self) -> pb.KvCacheState | None:
        """What the executor says of its cache; None without one."""
        info = await self.call(self.stub.GetModelInfo(pb.GetModelInfoRequest()))
        return info.kv_cache if info.HasField("kv_cache") else None

    async def call(self, call: Awaitable[_T]) -> _T:
        """Waits for a good answer; see `Target.call`."""
        return await self.target.call(call)

    async def refused(self, call: Awaitable[object], code: grpc.StatusCode, contract: str) -> None:
        """Waits for an error; see `Target.refused`."""
        await self.target.refused(call, code, contract)

    @staticmethod
    def true(condition: bool, contract: str, expected: object, got: object) -> None:
        """Raises CaseFailedError where a condition does not hold."""
        checks.true(condition, contract, expected, got)

    @staticmethod
    def equal(got: object, expected: object, contract: str) -> None:
        """Raises CaseFailedError where two values differ."""
        checks.equal(got, expected, contract)

    @staticmethod
    def ints(array: common_pb2.Int32Array, name: str) -> list[int]:
        """Unpacks a column that came, once it is known to be one."""
        return checks.ints(array, name)

    async def unharmed(self, *tracks: Track) -> None:
        """Goes on with sequences on a new stream: what they have in the cache must be what it was."""
        stream = self.stream()
        for track in tracks:
            await stream.decode(track, 2)
        await stream.close()

    async def close(self) -> None:
        """Ends what streams are still open."""
        for stream in self._streams:
            stream.cancel()

    async def judged(self, contract: str) -> None:
        """Compares all outputs with what they should have been. The cache may be another then.

        Raises:
            CaseFailedError: The first that is wrong.
        """
        noted = self._notes.noted
        answers = await self.judge.expected([question for question, _ in noted])
        for (question, output), expected in zip(noted, answers, strict=True):
            found = disagreement(output, expected, self.judge.tolerance)
            if found is not None:
                place = f"after {len(question.tokens)} tokens" + (" with an adapter" if question.adapter else "")
                raise CaseFailedError(contract, f"{place}: {found[0]} by {self.judge.name}", found[1])


async def _collected(call: Any) -> list[pb.ListBlockTagsResponse]:
    return [portion async for portion in call]
