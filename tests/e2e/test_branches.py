"""Several outputs for one prompt, on real processes: each is that of a request of its own, none is computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvplane_client import (
    NO_RETRY,
    AsyncClient,
    FinishReason,
    GenerateOptions,
    InvalidArgumentError,
    NotFoundError,
    RetryPolicy,
    branch_seed,
)
from kvplane_client.types import CompletionBuilder

from executor_service.backends.sim_digest import expected_tokens
from tests.e2e.cluster import Cluster, Proxy, settled
from tests.e2e.load import VOCAB_SIZE
from tests.e2e.model_cluster import ModelCluster, model_cluster
from tests.unit.executor.step_builder import prompt_of, save_tiny_model

PROMPT = [7 * index % 1000 for index in range(53)]
"""Three blocks of 16, and five tokens of a fourth."""

SAMPLED = GenerateOptions(temperature=1.0, seed=2**64 - 5, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("queue_ahead", [True, False])
async def test_outputs_equal_requests_of_their_own_and_compute_the_prompt_once(
    cluster: Cluster, queue_ahead: bool
) -> None:
    cluster.start({"queue_ahead": queue_ahead}, sim_step_ms=0, block_size=16, sim_num_blocks=200)
    async with cluster.client() as client:
        before = await settled(client)
        outputs = await client.stream(PROMPT, n=4, **SAMPLED).completions()
        after = await settled(client)
        await client.reset_prefix_cache()
        alone = [
            await client.generate(PROMPT, **{**SAMPLED, "seed": branch_seed(2**64 - 5, index)}) for index in range(4)
        ]
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert len({output.token_ids for output in outputs}) == 4
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    assert [(output.usage.prompt_tokens, output.usage.completion_tokens) for output in outputs] == [(53, 40)] * 4
    # The prompt once, and of each output all tokens but the last.
    assert after.tokens_computed - before.tokens_computed == 53 + 4 * 39
    assert after.tokens_generated - before.tokens_generated == 4 * 40
    assert after.prefix_queries - before.prefix_queries == 53


async def test_outputs_on_a_pool_that_is_too_small_equal_those_on_a_large_one(cluster: Cluster) -> None:
    """16 blocks: the outputs preempt each other, over and over, and copies meet evictions."""
    manager = {"max_num_batched_tokens": 32, "max_num_seqs": 12, "watermark": 0.0}
    cluster.start(manager, sim_step_ms=0, block_size=8, sim_num_blocks=17)
    options = GenerateOptions(temperature=1.0, max_tokens=30, ignore_eos=True)
    async with cluster.client() as client, client.many() as many:
        requests = [many.submit(PROMPT[: 20 + index], n=4, seed=index, **options) for index in range(8)]
        got = await asyncio.gather(*(request.completions() for request in requests))
        stats = await settled(client)
        for index, outputs in enumerate(got):
            for place, output in enumerate(outputs):
                alone = many.submit(PROMPT[: 20 + index], seed=branch_seed(index, place), **options)
                assert output.token_ids == (await alone.completion()).token_ids
    assert stats.preemptions > 0


async def test_abort_ends_every_output_and_frees_every_block(cluster: Cluster) -> None:
    cluster.start({}, sim_step_ms=5, block_size=16, sim_num_blocks=200)
    async with cluster.client() as client:
        stream = client.stream(PROMPT, n=3, request_id="several", **{**SAMPLED, "max_tokens": 2_000})
        chunks = [await anext(stream)]
        listed = {request.request_id async for request in client.list_requests()}
        await client.abort("several")
        chunks += [chunk async for chunk in stream]
        stats = await settled(client)
        with pytest.raises(NotFoundError):
            await client.abort("several")
    assert listed == {"several", "several#1", "several#2"}
    ends = {chunk.index: chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None}
    assert ends == dict.fromkeys(range(3), FinishReason.ABORT)
    assert stats.requests_finished == {"abort": 3}


async def test_cancelled_call_ends_every_output(cluster: Cluster) -> None:
    cluster.start({}, sim_step_ms=5, block_size=16, sim_num_blocks=200)
    async with cluster.client() as client:
        async with client.stream(PROMPT, n=3, **{**SAMPLED, "max_tokens": 2_000}) as stream:
            await anext(stream)
        stats = await settled(client)
    assert stats.requests_finished == {"abort": 3}


async def test_forks_compute_nothing_that_their_parent_has_computed(cluster: Cluster) -> None:
    """Without a prefix cache: a fork of a fork, and one whose last token is another, while all of them run."""
    cluster.start({"enable_prefix_caching": False}, sim_step_ms=20, block_size=16, sim_num_blocks=200)
    async with cluster.client() as client, client.many() as many:
        before = await settled(client)
        parent = many.submit(PROMPT, temperature=1.0, seed=1, max_tokens=200)
        tokens = [token for _ in range(7) for token in (await anext(parent)).token_ids]
        fork = parent.fork(seed=2)
        of_fork = [token for _ in range(4) for token in (await anext(fork)).token_ids]
        grandchild = fork.fork(seed=3)
        beam = parent.fork(token_ids=[*tokens[:-1], 77], seed=4)
        outputs = await asyncio.gather(*(one.completion() for one in (parent, fork, grandchild, beam)))
        after = await settled(client)
        refused = many.submit(PROMPT, temperature=0.0, max_tokens=200)
        for _ in range(3):
            await anext(refused)
        with pytest.raises(InvalidArgumentError) as caught:
            await refused.fork(token_ids=[1, 2]).completion()
    assert (caught.value.reason, caught.value.metadata["field"]) == ("NOT_A_FORK", "fork_of")
    starts = [[], tokens, tokens + of_fork, [*tokens[:-1], 77]]
    heads = [tokens, of_fork, [], []]  # what was taken of each before its end was waited for
    for seed, (start, head, output) in enumerate(zip(starts, heads, outputs, strict=True), start=1):
        expected = expected_tokens(PROMPT + start, 200 - len(start), vocab_size=VOCAB_SIZE, seed=seed, temperature=1.0)
        assert head + list(output.token_ids) == expected
        assert output.usage.completion_tokens == 200
    # The prompt once; of each all tokens but the last, beginning with the last that it was forked with.
    computed = len(PROMPT) + 199 + sum(200 - len(start) for start in starts[1:])
    assert after.tokens_computed - before.tokens_computed == computed


async def test_stream_cut_again_and_again_gives_every_output_once(cluster: Cluster) -> None:
    """The manager lives on; each cut ends a call, and another goes on from where it was."""
    cluster.start({}, sim_step_ms=2, block_size=16, sim_num_blocks=200)
    async with Proxy() as proxy, cluster.client() as client:
        proxy.target.set_result(cluster.address)
        retry = RetryPolicy(max_attempts=1000, initial_backoff=0.01, max_backoff=0.05)
        tokens: list[list[int]] = [[], [], [], []]
        cuts = 0
        async with AsyncClient(f"127.0.0.1:{proxy.port}", retry=retry) as behind:
            async for chunk in behind.stream(PROMPT, n=4, **SAMPLED):
                tokens[chunk.index] += chunk.token_ids
                if sum(map(len, tokens)) > 20 * cuts:
                    cuts += 1
                    await proxy.cut()
        await settled(client)
        await client.reset_prefix_cache()
        alone = [
            await client.generate(PROMPT, **{**SAMPLED, "seed": branch_seed(2**64 - 5, index)}) for index in range(4)
        ]
    assert cuts >= 5
    assert [tuple(ids) for ids in tokens] == [output.token_ids for output in alone]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelCluster]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny-model"), "qwen3")
    with model_cluster(request, tmp_path_factory.mktemp("tiny")) as cluster:
        cluster.start_model(folder, {"max_num_seqs": 16}, num_blocks_override=100, memory_limit="2GiB")
        yield cluster


@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [1, 16, 37])
async def test_outputs_of_a_torch_model_equal_requests_of_their_own(served: ModelCluster, length: int) -> None:
    prompt = prompt_of(length, 3)
    options = GenerateOptions(temperature=1.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.2, logprobs=2)
    async with served.client(retry=NO_RETRY) as client:
        await client.reset_prefix_cache()  # a shorter prompt of another case may be the beginning of this one
        before = await settled(client)
        outputs = await client.stream(prompt, n=5, seed=11, **options).completions()
        after = await settled(client)
        await client.reset_prefix_cache()
        alone = [await client.generate(prompt, seed=branch_seed(11, index), **options) for index in range(5)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert len({output.token_ids for output in outputs}) == 5
    for output, own in zip(outputs, alone, strict=True):
        for entry, expected in zip(output.logprobs, own.logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert after.tokens_computed - before.tokens_computed == length + 5 * 39


@pytest.mark.timeout(600)
async def test_cut_stream_of_a_torch_model_goes_on_with_the_same_tokens_and_logprobs(served: ModelCluster) -> None:
    options = GenerateOptions(
        n=3, seed=5, temperature=1.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.2, logprobs=2
    )
    async with Proxy() as proxy, served.client() as client:
        proxy.target.set_result(served.address)
        await client.reset_prefix_cache()  # of what other tests have left
        undisturbed = await client.stream(prompt_of(37, 3), **options).completions()
        await settled(client)
        await client.reset_prefix_cache()
        builders = [CompletionBuilder() for _ in range(3)]
        num_tokens = num_cuts = 0
        async with AsyncClient(f"127.0.0.1:{proxy.port}", retry=RetryPolicy(max_attempts=1000)) as behind:
            async for chunk in behind.stream(prompt_of(37, 3), **options):
                builders[chunk.index].add(chunk)
                num_tokens += len(chunk.token_ids)
                if num_tokens > 30 * (num_cuts + 1):
                    num_cuts += 1
                    await proxy.cut()
    assert num_cuts >= 2
    for output, expected in zip([builder.build() for builder in builders], undisturbed, strict=True):
        assert output.token_ids == expected.token_ids
        assert (output.finish_reason, output.usage) == (expected.finish_reason, expected.usage)
        for entry, like in zip(output.logprobs, expected.logprobs, strict=True):
            assert entry.logprob == pytest.approx(like.logprob, abs=1e-4)
            assert [one.token_id for one in entry.top] == [one.token_id for one in like.top]
