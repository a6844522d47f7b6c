"""How tokens are drawn: what every executor must keep to, whatever its arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Sample, greedy
from kvplane_client.conformance.target import MAX_SEQS

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
_ORDER = (
    "TokenSampling: The order is: repetition, presence and frequency penalty, bias, suppression, temperature, top_k, "
    "top_p, min_p."
)
_REPETITION = "TokenSampling.repetition_penalty: repetition_penalty in [0.0625, 16]; 1 is none."
_FED = (
    "PenaltyHistories.token_ids: A token that feeds_from fills is not among them; the executor adds it as an output "
    "token."
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
async def same_token_however_computed(bench: Bench) -> None:
    """A seed draws the same after a whole prompt, after its last chunk, after a decode, and beside another row."""
    size = bench.block_size
    samples = [Sample(_coin(bench, 2), seed) for seed in range(MAX_SEQS)]
    stream = bench.stream()
    drawn = []
    for first in (0, size, size + 2):
        track = bench.track(size + 3)
        if first:
            await stream.step(track.next(first, samples=()))
        drawn.append((await stream.step(track.next(samples=samples))).tokens)
    track = bench.track(size + 3)
    beside = await stream.step(bench.track(2, salt=1).next(samples=()), track.next(samples=samples))
    bench.equal([*drawn, beside.tokens], [drawn[0]] * 4, _PURE)


@TOPIC.case(_PURE)
async def other_positions_other_tokens(bench: Bench) -> None:
    """One seed does not draw the same of four tokens that are as likely at sixteen positions."""
    _require_logits(bench)
    stream = bench.stream()
    sample = Sample(_coin(bench, 4), 77)
    tokens: list[int] = []
    for first in range(1, 17, 4):
        rows = [bench.track(length, salt=length) for length in range(first, first + 4)]
        tokens += (await stream.step(*(row.next(samples=[sample]) for row in rows))).tokens
    bench.true(len(set(tokens)) > 1, _PURE, "more than one token", tokens)


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


@TOPIC.case(_REPETITION)
async def repetition_counts_the_prompt(bench: Bench) -> None:
    """A repetition penalty of 16 on a token of the prompt makes another one the likeliest, of one of four prompts."""
    _require_logits(bench)
    stream = bench.stream()
    changed = []
    for salt in range(4):
        track, again = (bench.track(bench.block_size + 1, salt=salt) for _ in range(2))
        (likeliest,) = (await stream.step(track.next(samples=[Sample(greedy())]))).tokens
        penalised = Sample(_params(repetition_penalty=16.0), history=([likeliest], 1))
        changed.append((await stream.step(again.next(samples=[penalised]))).tokens != [likeliest])
    bench.true(any(changed), _REPETITION, "another token than without", "the same after each prompt")


@TOPIC.case(_ORDER)
async def in_the_order_given(bench: Bench) -> None:
    """What is suppressed stays so whatever its bias; top_k goes by bias, top_p and min_p by temperature."""
    _require_logits(bench)
    one, other = 0, bench.info.vocab_size - 1

    def biased(one_by: float, other_by: float, **values: float) -> pb.TokenSampling:
        params = _params(**values)
        params.logit_bias.update({one: one_by, other: other_by})
        return params

    stream = bench.stream()
    suppressed = biased(1000.0, 500.0)
    suppressed.suppressed_token_ids.append(one)
    narrowed = biased(1000.0, 500.0, temperature=1.0)
    narrowed.top_k = 1
    samples = [Sample(suppressed), *(Sample(narrowed, seed) for seed in range(3))]
    tokens = (await stream.step(bench.track(bench.block_size + 1).next(samples=samples))).tokens
    bench.equal(tokens, [other, one, one, one], _ORDER)
    # At temperature 1 one token has all; at 1,000 the other is nearly as likely.
    for limits in ({"top_p": 0.9}, {"min_p": 0.5}):
        kept: set[int] = set()
        for first in (0, MAX_SEQS):
            params = biased(20_100.0, 20_000.0, temperature=1000.0, **limits)
            samples = [Sample(params, seed) for seed in range(first, first + MAX_SEQS)]
            kept.update((await stream.step(bench.track(bench.block_size + 1).next(samples=samples))).tokens)
        bench.true({one, other} <= kept, _ORDER, f"tokens {one} and {other} with {limits}", sorted(kept))


@TOPIC.case(_FED)
async def fed_token_counts_as_output(bench: Bench) -> None:
    """A token that the step before sampled is penalised as one that was produced, though no history has it."""
    _require_logits(bench)
    fed, other = 0, bench.info.vocab_size - 1
    stream = bench.stream()

    def chosen(token: int, num_logprobs: int = -1) -> Sample:
        params = greedy(num_logprobs)
        params.logit_bias[token] = 1000.0
        return Sample(params)

    measured = bench.track(bench.block_size)
    measured.tokens.append(fed)
    answer = await stream.step(measured.next(samples=[chosen(fed, 0), chosen(other, 0)]))
    ((_, of_fed),), ((_, of_other),) = (output.logprobs for output in answer.outputs)
    # The token that was fed is ahead of the other by 2, and 4 is what both penalties take once.
    params = _params(presence_penalty=2.0, frequency_penalty=2.0)
    params.logit_bias.update({fed: 1000.0, other: 998.0 + of_fed - of_other})
    for history, expected in ((((), 0), other), (((fed,), 1), other)):
        track = bench.track(bench.block_size)
        await stream.step(track.next(samples=[chosen(fed)]))
        answer = await stream.step(track.fed(0, samples=[Sample(params, history=history)]), feeds=True)
        bench.equal(answer.tokens, [expected], _FED)
    track = bench.track(bench.block_size)
    track.tokens.append(fed)
    answer = await stream.step(track.next(samples=[Sample(params, history=((fed,), 1))]))
    bench.equal(answer.tokens, [fed], "PenaltyHistories.prompt_lens: Presence and frequency count the others.")


def _coin(bench: Bench, sides: int) -> pb.TokenSampling:
    """Parameters by which so many tokens are nearly as likely as each other, in a fixed order; no other can come."""
    params = _params(temperature=10_000.0)
    params.top_k = sides
    last = bench.info.vocab_size - 1
    params.logit_bias.update({last * side // (sides - 1): 10_000.0 - 100 * side for side in range(sides)})
    return params


def _require_logits(bench: Bench) -> None:
    """Raises CaseSkippedError for the sim backend, whose tokens come from no logits."""
    if bench.info.backend == "sim":
        raise CaseSkippedError("the sim backend has no logits")
