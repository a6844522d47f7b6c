"""The arithmetic itself, beside the kit's own on a small random model (`kvplane conformance --model`)."""

from __future__ import annotations

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.judges import ModelJudge
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic

TOPIC = Topic("numerics")

_MODEL = "GetModelInfoResponse.model_fingerprint: same architecture, same vocabulary, same weights"
_LOGPROBS = (
    "TokenSampling.num_logprobs: num_logprobs is -1 for none, 0 for the produced token's log probability, n for the n "
    "likeliest beside it. Taken before penalties, bias and temperature."
)
_POSITIONS = (
    "ExecuteRequest.positions: positions are the tokens' positions in their sequences; consecutive within a row."
)


def _require_model(bench: Bench) -> None:
    if not isinstance(bench.judge, ModelJudge):
        raise CaseSkippedError("needs a model that the kit knows: --write-model, then --model")


@TOPIC.case(_MODEL)
async def after_one_token(bench: Bench) -> None:
    """One token, without context: embeddings, layers and the head."""
    _require_model(bench)
    stream = bench.stream()
    for salt in range(8):
        await stream.step(bench.track(1, salt=salt, blocks=[salt]).next())


@TOPIC.case(_LOGPROBS)
async def after_every_length(bench: Bench) -> None:
    """Prompts of every length up to two blocks and a bit: positions and attention over all that is there."""
    _require_model(bench)
    stream = bench.stream()
    size = bench.block_size
    lengths = range(1, 2 * size + 3) if size <= 16 else (1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 2)
    for length in lengths:
        await stream.step(bench.track(length, salt=length, blocks=[4, 1, 7, 2]).next())


@TOPIC.case(_POSITIONS)
async def long_decode(bench: Bench) -> None:
    """A sequence decodes far beyond its prompt."""
    _require_model(bench)
    track = bench.track(3, salt=1, blocks=bench.blocks(3 + 64 // bench.block_size + 1))
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, min(64, 2 * bench.block_size + 5))


@TOPIC.case(_LOGPROBS)
async def mixed_batch(bench: Bench) -> None:
    """Chunks, prompts and decodes in one step, each as it would be alone."""
    _require_model(bench)
    size = bench.block_size
    stream = bench.stream()
    decoding = [bench.track(size * count + 1, salt=count) for count in (1, 2)]
    for track in decoding:
        await stream.prefill(track)
    chunked = bench.track(2 * size, salt=7)
    await stream.step(chunked.next(size + 1), *(track.next() for track in decoding), bench.track(size, salt=8).next())
    await stream.step(bench.track(5, salt=9).next(), chunked.next())
