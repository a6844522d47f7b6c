"""Through the whole split, in float32, tokens are those of transformers' own generate, however steps are composed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kvplane_client import NO_RETRY, AsyncClient, Completion, FinishReason

from executor_service.gguf_conversion import converted_folder, default_cache_dir
from tests.e2e.cluster import settled
from tests.e2e.model_cluster import ModelCluster, model_cluster
from tests.e2e.model_reference import Drawn, Reference, trace_prompts, varied_prompts

# A safety net: on a busy machine the reference alone takes minutes.
pytestmark = [pytest.mark.model, pytest.mark.timeout(3000)]

NEW_TOKENS = 48
TRACE_PROMPT_TOKENS = 256
BLOCK_SIZE = 16
MIN_PREEMPTIONS = 10
EXECUTOR: dict[str, object] = {"max_model_len": 1024, "block_size": BLOCK_SIZE, "num_blocks_override": 1024}
SMALL_STEPS: dict[str, object] = {"max_num_batched_tokens": 512, "max_num_seqs": 64}


@dataclass(frozen=True)
class Setup:
    """How a cluster is started."""

    manager: dict[str, object] = field(default_factory=dict)
    executor: dict[str, object] = field(default_factory=dict)


SETUPS = {
    "roomy": Setup(),
    "one_step_out": Setup(manager={"queue_ahead": False}),
    "64_tokens_a_step": Setup(manager={"max_num_batched_tokens": 64, "max_num_seqs": 24}),
    "few_blocks": Setup(executor={"num_blocks_override": 32}),
}


def with_setups(*names: str) -> pytest.MarkDecorator:
    """Run a test on these setups' clusters; tests of one setup run together."""
    return pytest.mark.parametrize("cluster", names, indirect=True, scope="module")


@pytest.fixture(scope="session")
def gguf() -> Path:
    path = os.environ.get("KVPLANE_TEST_MODEL")
    if not path:
        pytest.skip("KVPLANE_TEST_MODEL names no model")
    return Path(path)


@pytest.fixture(scope="session")
def folder(gguf: Path) -> Path:
    return converted_folder(gguf, default_cache_dir())


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[list[int]]:
    """20 of our own and, with KVPLANE_TRACES, 20 of a real trace."""
    texts = [reference.tokenizer.encode(text) for text in varied_prompts()]
    if traces := os.environ.get("KVPLANE_TRACES"):
        trace = trace_prompts(Path(traces) / "sharegpt_prompts.jsonl", 20)
        texts += [reference.tokenizer.encode(text)[:TRACE_PROMPT_TOKENS] for text in trace]
    return texts


OWN = slice(0, 20)
TRACE = slice(20, 40)
ALL = slice(0, 40)
ONE_BY_ONE = [
    pytest.param(OWN, id="own"),
    pytest.param(TRACE, id="trace", marks=pytest.mark.soak),
]
"""Which of the prompts; a request alone takes a step for each token, so those of the trace are for the long run."""

AT_ONCE = pytest.mark.parametrize(
    ("cluster", "part"),
    [
        pytest.param("roomy", ALL, id="roomy"),
        pytest.param("one_step_out", OWN, id="one_step_out"),
        pytest.param("one_step_out", ALL, id="one_step_out-all", marks=pytest.mark.soak),
        pytest.param("64_tokens_a_step", ALL, id="64_tokens_a_step"),
    ],
    indirect=["cluster"],
    scope="module",
)
"""Long prompts make what the large pool and the small steps are about; with one step out, most are for the long run."""


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelCluster]:
    setup: Setup = SETUPS[request.param]
    with model_cluster(request, tmp_path_factory.mktemp(request.param)) as made:
        cache = {"cache_dir": default_cache_dir()}
        made.start_model(gguf, SMALL_STEPS | setup.manager, **(EXECUTOR | cache | setup.executor))
        yield made


@with_setups("roomy")
@pytest.mark.parametrize("part", ONE_BY_ONE)
async def test_generate_one_by_one_equals_transformers(
    cluster: ModelCluster, part: slice, reference: Reference, prompts: list[list[int]]
) -> None:
    chosen = prompts[part]
    if not chosen:
        pytest.skip("KVPLANE_TRACES names no folder of traces")
    async with cluster.client(retry=NO_RETRY) as client:
        done = [
            await client.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, cache_salt="alone") for prompt in chosen
        ]
    check(reference, chosen, done)


@AT_ONCE
async def test_generate_all_at_once_equals_transformers(
    cluster: ModelCluster, part: slice, reference: Reference, prompts: list[list[int]]
) -> None:
    chosen = prompts[part]
    async with cluster.client(retry=NO_RETRY) as client:
        await client.reset_prefix_cache()
        done = await at_once(client, chosen, temperature=0, max_tokens=NEW_TOKENS)
        stats = await settled(client)
    check(reference, chosen, done)
    assert stats.preemptions == stats.steps_failed == 0


@AT_ONCE
async def test_generate_from_cached_prefixes_equals_transformers(
    cluster: ModelCluster, part: slice, reference: Reference, prompts: list[list[int]]
) -> None:
    chosen = prompts[part]
    async with cluster.client(retry=NO_RETRY) as client:
        # Where the test before this one has run, the prompts' blocks are there already.
        await at_once(client, chosen, temperature=0, max_tokens=1)
        done = await at_once(client, chosen, temperature=0, max_tokens=NEW_TOKENS)
    check(reference, chosen, done)
    assert [completion.usage.cached_tokens for completion in done] == [full_blocks(prompt) for prompt in chosen]


@with_setups("roomy")
async def test_prompt_text_becomes_the_tokens_of_transformers(cluster: ModelCluster, reference: Reference) -> None:
    texts = varied_prompts()
    ids = [reference.tokenizer.encode(text) for text in texts]
    async with cluster.client(retry=NO_RETRY) as client:
        first = await at_once(client, texts, temperature=0, max_tokens=1, cache_salt="text")
        second = await at_once(client, ids, temperature=0, max_tokens=1, cache_salt="text")
    assert [completion.usage.prompt_tokens for completion in first] == [len(each) for each in ids]
    # Blocks are found by their tokens: all full ones are only if the server's tokens were these.
    assert [completion.usage.cached_tokens for completion in second] == [full_blocks(each) for each in ids]
    assert [completion.token_ids for completion in first] == [completion.token_ids for completion in second]


@with_setups("roomy")
async def test_chat_becomes_the_tokens_of_transformers(cluster: ModelCluster, reference: Reference) -> None:
    chats = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [
            {"role": "system", "content": "You answer in one sentence — with an emoji 🎉."},
            {"role": "user", "content": "Wie heißt die Hauptstadt von Österreich?"},
            {"role": "assistant", "content": "Wien.\n"},
            {"role": "user", "content": " And of Japan, 日本? "},
        ],
    ]
    for chat in chats:
        ids = reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        async with cluster.client(retry=NO_RETRY) as client:
            done = await client.generate(chat, temperature=0, max_tokens=NEW_TOKENS, cache_salt="chat")
            again = await client.generate(ids, temperature=0, max_tokens=1, cache_salt="chat")
        assert done.usage.prompt_tokens == len(ids)
        assert again.usage.cached_tokens == full_blocks(ids)
        reference.count_ties(ids, done.token_ids, NEW_TOKENS)


@with_setups("roomy")
async def test_streamed_text_is_the_decoded_output(cluster: ModelCluster, reference: Reference) -> None:
    async def read(client: AsyncClient, prompt: str) -> tuple[list[str], list[int]]:
        pieces, token_ids = [], []
        async with client.stream(prompt, temperature=0, max_tokens=NEW_TOKENS) as stream:
            async for chunk in stream:
                pieces.append(chunk.text)
                token_ids += chunk.token_ids
        return pieces, token_ids

    async with cluster.client(retry=NO_RETRY) as client:
        read_all = await asyncio.gather(*(read(client, text) for text in varied_prompts()))
    outside_ascii = 0
    for pieces, token_ids in read_all:
        expected = reference.tokenizer.decode(token_ids, skip_special_tokens=True)
        text = "".join(pieces)
        # What max_tokens cut within a character, the last piece shows as such; no piece before it may.
        assert text == expected
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        outside_ascii += not text.isascii()
    assert outside_ascii >= 5, "expected prompts whose outputs try what characters of several tokens do"


@with_setups("roomy")
async def test_stop_string_ends_the_text_before_it(cluster: ModelCluster, reference: Reference) -> None:
    prompt = varied_prompts()[0]
    ids = reference.tokenizer.encode(prompt)
    text = reference.tokenizer.decode(reference.tokens(ids, NEW_TOKENS), skip_special_tokens=True)
    # Cuts tokens at both ends, if they are words.
    stop = text[31:42]
    expected = text[: text.index(stop)]
    async with cluster.client(retry=NO_RETRY) as client:
        done = await client.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, stop=stop)
        whole = await client.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, stop=stop, include_stop=True)
        await settled(client)
    assert (done.text, done.finish_reason, done.stop_match) == (expected, FinishReason.STOP, stop)
    assert (whole.text, whole.finish_reason, whole.stop_match) == (expected + stop, FinishReason.STOP, stop)
    assert list(done.token_ids) == reference.tokens(ids, NEW_TOKENS)[: len(done.token_ids)]
    assert stop in reference.tokenizer.decode(list(done.token_ids), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("cluster", "together"),
    [("roomy", False), ("roomy", True), ("few_blocks", True)],
    indirect=["cluster"],
    scope="module",
)
async def test_generate_drawn_equals_reference(
    cluster: ModelCluster,
    together: bool,
    reference: Reference,
    prompts: list[list[int]],
    request: pytest.FixtureRequest,
) -> None:
    chosen, drawn = prompts[:12], Drawn(seed=20_250_611, temperature=0.9, top_p=0.9)
    options: dict[str, Any] = {"seed": drawn.seed, "temperature": drawn.temperature, "top_p": drawn.top_p}
    options |= {"max_tokens": NEW_TOKENS, "cache_salt": f"drawn {together}"}
    async with cluster.client(retry=NO_RETRY) as client:
        before = await settled(client)
        if together:
            done = await at_once(client, chosen, **options)
        else:
            chosen = chosen[:4]  # one row with draws of its own is like another
            done = [await client.generate(prompt, **options) for prompt in chosen]
        preemptions = (await settled(client)).preemptions - before.preemptions
    check(reference, chosen, done, drawn)
    print(f"{preemptions} preemptions")
    assert (preemptions > 0) == ("few_blocks" in request.node.name)


@with_setups("few_blocks")
@pytest.mark.parametrize("part", [pytest.param(OWN, id="own"), pytest.param(ALL, id="all", marks=pytest.mark.soak)])
async def test_generate_preempted_equals_transformers(
    cluster: ModelCluster, part: slice, reference: Reference, prompts: list[list[int]]
) -> None:
    # Of the trace's prompts alone, one at a time fits into the pool: it is the short ones that run, and give way.
    chosen = prompts[part]
    async with cluster.client(retry=NO_RETRY) as client:
        before = await settled(client)
        # Twice, with salts: blocks that they could share would make room.
        halves = await asyncio.gather(
            at_once(client, chosen, temperature=0, max_tokens=NEW_TOKENS, cache_salt="one"),
            at_once(client, chosen, temperature=0, max_tokens=NEW_TOKENS, cache_salt="other"),
        )
        preemptions = (await settled(client)).preemptions - before.preemptions
    for done in halves:
        check(reference, chosen, done)
    print(f"{preemptions} preemptions")
    assert preemptions >= MIN_PREEMPTIONS


async def at_once(client: AsyncClient, prompts: Sequence[Any], **options: Any) -> list[Completion]:
    """Generate for all prompts together, each on a stream of its own."""
    return await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts))


def full_blocks(prompt: Sequence[int]) -> int:
    """Prompt tokens that a cache can give: whole blocks, and never the last token."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def check(
    reference: Reference,
    prompts: list[list[int]],
    done: list[Completion],
    drawn: Drawn | None = None,
) -> None:
    """Every output is the reference's; how many ties there were is printed."""
    reference.prepare(prompts, NEW_TOKENS, drawn)
    ties = sum(
        reference.count_ties(prompt, completion.token_ids, NEW_TOKENS, drawn)
        for prompt, completion in zip(prompts, done, strict=True)
    )
    tokens = sum(len(completion.token_ids) for completion in done)
    print(f"{ties} ties in {tokens} tokens of {len(done)} prompts")
    for prompt, completion in zip(prompts, done, strict=True):
        assert completion.usage.prompt_tokens == len(prompt)
        assert completion.usage.completion_tokens == len(completion.token_ids)
        expected = FinishReason.LENGTH if len(completion.token_ids) == NEW_TOKENS else FinishReason.STOP
        assert completion.finish_reason is expected
