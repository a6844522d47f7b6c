"""How tokens are drawn: what every executor must keep to, whatever its arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Sample, greedy

TOPIC = Topic("sampling")

_PURE = (
    "SamplingBatch.seeds: The random number used is a function of this and of the position of the token to be produced."
)
_SUPPRESSED = "TokenSampling.suppressed_token_ids: suppressed_token_ids can not be produced (min_tokens not reached)."
_BIAS = "TokenSampling.logit_bias: logit_bias is added to the logits of the named token ids."
_TOP_K = "TokenSampling.top_k: top_k keeps the k likeliest; 0 keeps all."
_TOP_P = "TokenSampling.top_p: top_p in (0, 1]; 1 keeps all."
_MIN_P = "TokenSampling.min_p: min_p in [0, 1]; 0 keeps all."
_LOGPROBS = (
    "TokenSampling.num_logprobs: num_logprobs is -1 for none, 0 for the produced token's log probability, n for the n "
    "likeliest beside it. Taken before penalties, bias and temperature."
)
_PENALTY = "PenaltyHistories.sample_index: Every sample whose params have a penalty must be here."


def _params(**values: float) -> pb.TokenSampling:
    """Parameters that change nothing, but for those given."""
    params = greedy()
    for name, value in values.items():
        setattr(params, name, value)
    return params


async def _tokens(bench: Bench, samples: Iterable[Sample], blocks: list[int] | None = None) -> list[int]:
    """What one prompt gives, drawn in these ways by one step."""
    track = bench.track(bench.block_size + 1, blocks=blocks)
    return (await bench.stream().step(track.next(samples=list(samples)))).tokens


@TOPIC.case(_PURE)
async def same_seed_same_tokens(bench: Bench) -> None:
    """The same seeds give the same tokens: again, in other blocks, in another order, beside others."""
    samples = [Sample(_params(temperature=1.5), seed) for seed in (0, 1, 2**64 - 1, 2**33)]
    first = await _tokens(bench, samples)
    bench.equal(await _tokens(bench, samples), first, _PURE)
    bench.equal(await _tokens(bench, samples[::-1]), first[::-1], _PURE)
    bench.equal(await _tokens(bench, samples[2:3]), first[2:3], _PURE)


@TOPIC.case(_PURE)
async def other_seeds_other_tokens(bench: Bench) -> None:
    """At a high temperature eight seeds do not all give one token."""
    tokens = await _tokens(bench, [Sample(_params(temperature=100.0), seed) for seed in range(8)])
    bench.true(len(set(tokens)) > 1, _PURE, "more than one token from 8 seeds", tokens)


@TOPIC.case(_PURE)
async def seed_does_not_matter_to_greedy(bench: Bench) -> None:
    """Temperature 0 gives the likeliest token, whatever the seed."""
    tokens = await _tokens(bench, [Sample(greedy(), seed) for seed in (0, 1, 99, 2**64 - 1)])
    bench.equal(set(tokens), {tokens[0]}, "TokenSampling.temperature: temperature at least 0; 0 is greedy.")


@TOPIC.case(_SUPPRESSED)
async def suppressed(bench: Bench) -> None:
    """The likeliest token cannot come when it is suppressed; then neither can the next."""
    banned: list[int] = []
    for _ in range(3):
        params = greedy()
        params.suppressed_token_ids.extend(banned)
        (token,) = await _tokens(bench, [Sample(params)], blocks=[0, 1, 2])
        bench.true(token not in banned, _SUPPRESSED, f"another token than {banned}", token)
        if bench.info.vocab_size <= len(banned) + 1:
            break
        banned.append(token)


@TOPIC.case(_BIAS)
async def bias_decides(bench: Bench) -> None:
    """A bias of 1,000 makes a token the likeliest."""
    _require_logits(bench)
    for token in (0, bench.info.vocab_size // 2, bench.info.vocab_size - 1):
        params = greedy()
        params.logit_bias[token] = 1000.0
        bench.equal(await _tokens(bench, [Sample(params)], blocks=[0, 1, 2]), [token], _BIAS)


@TOPIC.case(_TOP_K)
async def narrowed_to_one(bench: Bench) -> None:
    """Where only the likeliest token is kept, any seed draws it: by top_k, by top_p, by min_p."""
    _require_logits(bench)
    (likeliest,) = await _tokens(bench, [Sample(greedy())], blocks=[0, 1, 2])
    for name, value, contract in (("top_k", 1, _TOP_K), ("top_p", 1e-6, _TOP_P), ("min_p", 1.0, _MIN_P)):
        params = _params(temperature=1.0)
        setattr(params, name, value)
        tokens = await _tokens(bench, [Sample(params, seed) for seed in range(4)], blocks=[0, 1, 2])
        bench.equal(tokens, [likeliest] * 4, contract)


@TOPIC.case(_TOP_K)
async def kept_by_top_k(bench: Bench) -> None:
    """With top_k 3 and any seed, the token is one of the three likeliest."""
    _require_logits(bench)
    if bench.info.max_logprobs < 3:
        raise CaseSkippedError(f"needs max_logprobs 3, got {bench.info.max_logprobs}")
    track = bench.track(bench.block_size + 1)
    answer = await bench.stream().step(track.next(samples=[Sample(greedy(3))]))
    three = {token for token, _ in answer.outputs[0].logprobs}
    params = _params(temperature=50.0)
    params.top_k = 3
    tokens = await _tokens(bench, [Sample(params, seed) for seed in range(8)])
    bench.true(set(tokens) <= three, _TOP_K, f"tokens of {sorted(three)}", tokens)


@TOPIC.case(_LOGPROBS)
async def logprobs_before_bias(bench: Bench) -> None:
    """Log probabilities are those of the raw logits: temperature and bias do not change them."""
    _require_logits(bench)
    count = min(2, bench.info.max_logprobs)
    plain, changed = greedy(count), greedy(count)
    changed.temperature = 2.0
    changed.top_k = 1
    track = bench.track(bench.block_size + 1)
    answer = await bench.stream().step(track.next(samples=[Sample(plain), Sample(changed, 3)]))
    bench.equal(answer.outputs[1], answer.outputs[0], _LOGPROBS)
    good = all(value <= 0 for _, value in answer.outputs[0].logprobs)
    bench.true(good, _LOGPROBS, "log probabilities of at most 0", answer.outputs[0].logprobs)


@TOPIC.case(_LOGPROBS)
async def logprobs_of_some(bench: Bench) -> None:
    """Samples that ask for different numbers of log probabilities, or none, get theirs."""
    most = bench.info.max_logprobs
    counts = (-1, most, 0, -1, min(1, most))
    track = bench.track(bench.block_size + 1)
    await bench.stream().step(track.next(samples=[Sample(greedy(count)) for count in counts]))


@TOPIC.case(_PENALTY)
async def penalties_use_the_history(bench: Bench) -> None:
    """A frequency penalty, at its highest, on a token that came often makes it less likely: it is not produced."""
    _require_logits(bench)
    (likeliest,) = await _tokens(bench, [Sample(greedy())], blocks=[0, 1, 2])
    params = _params(frequency_penalty=2.0)
    history = [likeliest] * 200
    (token,) = await _tokens(bench, [Sample(params, history=(history, 0))], blocks=[0, 1, 2])
    contract = "PenaltyHistories.prompt_lens: Presence and frequency count the others."
    bench.true(token != likeliest, contract, f"another token than {likeliest}", token)
    (token,) = await _tokens(bench, [Sample(params, history=(history, 200))], blocks=[0, 1, 2])
    bench.equal(token, likeliest, contract)


def _require_logits(bench: Bench) -> None:
    """Raises CaseSkippedError for the sim backend, whose tokens come from no logits."""
    if bench.info.backend == "sim":
        raise CaseSkippedError("the sim backend has no logits")
