"""LoRA adapters through the whole split: exact against peft, kept apart in the cache, and there again after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvplane_client import (
    NO_RETRY,
    AlreadyExistsError,
    AsyncClient,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)

from executor_service.backends.sim_digest import adapter_revision, adapter_salt, expected_tokens
from tests.e2e.cluster import Cluster, eventually, serving, settled
from tests.e2e.model_cluster import ModelCluster, model_cluster
from tests.unit.executor.lora_builder import ATTENTION, peft_tokens, save_adapter
from tests.unit.executor.step_builder import prompt_of, save_tiny_model

PROMPT = list(range(100, 140))
COUNT = 60


def sim_tokens(source: str | None, prompt: list[int] = PROMPT, count: int = COUNT) -> list[int]:
    salt = 0 if source is None else adapter_salt(adapter_revision(source))
    return expected_tokens(prompt, count, vocab_size=32_000, salt=salt)


async def tokens(client: AsyncClient, adapter: str | None, count: int = COUNT) -> list[int]:
    done = await client.generate(PROMPT, temperature=0, max_tokens=count, adapter=adapter)
    return list(done.token_ids)


async def test_requests_with_adapters_and_without_share_steps_and_no_blocks(cluster: Cluster) -> None:
    cluster.start(max_loras=2)
    async with cluster.client(retry=NO_RETRY) as client:
        await client.load_adapter("a", "weights-a")
        await client.load_adapter("b", "weights-b")
        sources = {"a": "weights-a", "b": "weights-b", None: None}
        got = await asyncio.gather(*(tokens(client, adapter) for adapter in sources))
        assert got == [sim_tokens(source) for source in sources.values()]
        before = await settled(client)
        assert before.prefix_hits == 0
        assert await tokens(client, "a") == got[0]
        after = await settled(client)
        assert after.prefix_hits - before.prefix_hits == 32, "within one adapter blocks are shared"


async def test_adapter_loaded_anew_with_other_weights_hits_no_old_block(cluster: Cluster) -> None:
    cluster.start(max_loras=1)
    async with cluster.client(retry=NO_RETRY) as client:
        first = await client.load_adapter("a", "weights-1")
        assert await tokens(client, "a") == sim_tokens("weights-1")
        with pytest.raises(AlreadyExistsError):
            await client.load_adapter("a", "weights-2")
        await client.unload_adapter("a")
        second = await client.load_adapter("a", "weights-2")
        assert first.revision != second.revision
        before = await settled(client)
        assert await tokens(client, "a") == sim_tokens("weights-2")
        assert (await settled(client)).prefix_hits == before.prefix_hits
        await client.unload_adapter("a")
        await client.load_adapter("a", "weights-1")
        assert await tokens(client, "a") == sim_tokens("weights-1")
        assert (await settled(client)).prefix_hits - before.prefix_hits == 32, "what the first left is right again"


async def test_adapter_that_is_not_there_or_not_free_is_refused_to_its_caller_alone(cluster: Cluster) -> None:
    cluster.start(max_loras=1)
    async with cluster.client(retry=NO_RETRY) as client:
        stream = client.stream(PROMPT, temperature=0, max_tokens=2_000)
        await anext(aiter(stream))
        with pytest.raises(NotFoundError, match="'a'"):
            await tokens(client, "a")
        with pytest.raises(NotFoundError, match="'a'"):
            await client.unload_adapter("a")
        with pytest.raises(InvalidArgumentError, match="name"):
            await client.load_adapter("", "weights-a")
        loaded = await client.load_adapter("a", "weights-a")
        assert await client.load_adapter("a", "weights-a") == loaded
        with pytest.raises(ResourceExhaustedError, match="--max-loras"):
            await client.load_adapter("b", "weights-b")
        using = client.stream(PROMPT, temperature=0, max_tokens=2_000, adapter="a", request_id="using")
        await anext(aiter(using))
        (listed,) = await client.list_adapters()
        assert (listed.name, listed.source, listed.requests) == ("a", "weights-a", 1)
        with pytest.raises(FailedPreconditionError, match="1 wait or run"):
            await client.unload_adapter("a")
        assert [one.adapter async for one in client.list_requests(request_id="using")] == ["a"]
        # What the aborted request has under way is waited for, not refused.
        await client.abort("using")
        await client.unload_adapter("a")
        assert await client.list_adapters() == []
        await client.load_adapter("b", "weights-b")
        assert await tokens(client, "b") == sim_tokens("weights-b")
        await stream.aclose()


async def test_adapters_load_and_unload_under_load_disturb_nobody(cluster: Cluster) -> None:
    cluster.start(max_loras=2, sim_step_ms=1)
    async with cluster.client(retry=NO_RETRY) as client:
        await client.load_adapter("kept", "weights-kept")

        async def load_use_unload(round_: int) -> list[int]:
            source = f"weights-{round_}"
            await client.load_adapter("changing", source)
            got = await tokens(client, "changing", 20)
            await client.unload_adapter("changing")
            return got

        others = [asyncio.create_task(tokens(client, name, 400)) for name in ("kept", None, "kept", None)]
        for round_ in range(8):
            assert await load_use_unload(round_) == sim_tokens(f"weights-{round_}", count=20)
        kept, base = sim_tokens("weights-kept", count=400), sim_tokens(None, count=400)
        assert await asyncio.gather(*others) == [kept, base, kept, base]


async def test_executor_killed_and_replaced_streams_with_adapters_go_on(cluster: Cluster) -> None:
    cluster.start(max_loras=2)
    async with cluster.client() as client:
        await client.load_adapter("a", "weights-a")
        await client.load_adapter("b", "weights-b")
        running = [asyncio.create_task(tokens(client, name, 300)) for name in ("a", "b", None)]

        async def all_run() -> bool:
            return (await client.get_stats()).tokens_generated > 60

        await eventually(all_run, "tokens of all")
        cluster.executors[0].kill()
        cluster.start_executor(wait=False, sim_step_ms=1, max_loras=2)
        sources = ("weights-a", "weights-b", None)
        assert await asyncio.gather(*running) == [sim_tokens(source, count=300) for source in sources]
        assert [one.name for one in await client.list_adapters()] == ["a", "b"]


async def test_executor_replaced_by_one_with_less_room_ends_the_requests_of_what_it_lacks_alone(
    cluster: Cluster,
) -> None:
    cluster.start(max_loras=2)
    async with cluster.client() as client:
        await client.load_adapter("a", "weights-a")
        await client.load_adapter("b", "weights-b")
        running = [asyncio.create_task(tokens(client, name, 300)) for name in ("a", "b", None)]

        async def all_run() -> bool:
            return (await client.get_stats()).tokens_generated > 60

        await eventually(all_run, "tokens of all")
        cluster.executors[0].kill()
        cluster.start_executor(wait=False, sim_step_ms=1, max_loras=1)
        first, second, base = await asyncio.gather(*running, return_exceptions=True)
        assert (first, base) == (sim_tokens("weights-a", count=300), sim_tokens(None, count=300))
        assert isinstance(second, FailedPreconditionError)
        assert second.reason == "ADAPTER_LOST"
        assert [one.name for one in await client.list_adapters()] == ["a"]


async def test_executor_switched_to_by_order_has_the_adapters_first_or_is_not_taken(cluster: Cluster) -> None:
    cluster.start(max_loras=2)
    async with cluster.client() as client:
        await client.load_adapter("a", "weights-a")
        running = [asyncio.create_task(tokens(client, name, 300)) for name in ("a", None)]
        for room in (0, 1):
            cluster.start_executor(sim_step_ms=1, max_loras=room, executor_id=f"room-{room}")
        with pytest.raises(FailedPreconditionError, match="cannot load 'a'") as refused:
            await client.switch_executor("room-0")
        assert refused.value.reason == "EXECUTOR_NOT_READY"
        assert await client.switch_executor("room-1") not in ("room-0", "room-1")
        assert await asyncio.gather(*running) == [sim_tokens(source, count=300) for source in ("weights-a", None)]
        assert [one.name for one in await client.list_adapters()] == ["a"]
        assert await tokens(client, "a", 20) == sim_tokens("weights-a", count=20)


async def test_manager_restarted_knows_the_executors_adapters_and_their_blocks(cluster: Cluster) -> None:
    cluster.start(max_loras=2)
    async with cluster.client() as client:
        loaded = await client.load_adapter("a", "weights-a")
        assert await tokens(client, "a") == sim_tokens("weights-a")
        await settled(client)
        cluster.manager.kill()
        cluster.start_manager()
        await serving(client)
        assert await client.list_adapters() == [loaded]
        assert await tokens(client, "a") == sim_tokens("weights-a")
        assert (await settled(client)).prefix_hits == 32
        assert await tokens(client, None) == sim_tokens(None)


async def test_executor_without_room_for_adapters_loads_none(cluster: Cluster) -> None:
    cluster.start()
    async with cluster.client(retry=NO_RETRY) as client:
        with pytest.raises(FailedPreconditionError, match="--max-loras"):
            await client.load_adapter("a", "weights-a")
        assert await client.list_adapters() == []
        assert await tokens(client, None) == sim_tokens(None)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelCluster, Path, dict[str, Path]]]:
    root = tmp_path_factory.mktemp("lora-model")
    model = save_tiny_model(root / "model", "llama")
    adapters = {
        "all": save_adapter(root / "all", model, 1),
        "attention": save_adapter(root / "attention", model, 2, r=8, use_rslora=True, target_modules=list(ATTENTION)),
        "mlp": save_adapter(root / "mlp", model, 3, r=2, target_modules=["gate_proj", "down_proj"]),
    }
    with model_cluster(request, tmp_path_factory.mktemp("lora")) as cluster:
        cluster.start_model(
            model,
            {"max_num_batched_tokens": 64, "max_num_seqs": 16},
            num_blocks_override=256,
            memory_limit="2GiB",
            max_loras=3,
            max_lora_rank=8,
        )
        yield cluster, model, adapters


@pytest.mark.timeout(1800)
async def test_several_adapters_in_a_batch_give_the_tokens_of_peft(
    served: tuple[ModelCluster, Path, dict[str, Path]],
) -> None:
    cluster, model, adapters = served
    count = 40
    names = [*adapters, None] * 3
    prompts = [prompt_of(length, length) for length in (5, 33, 70, 17, 1, 48, 9, 64, 2, 20, 100, 31)]
    async with cluster.client() as client:
        for name, folder in adapters.items():
            await client.load_adapter(name, str(folder))
        ask = zip(prompts, names, strict=True)
        done = await asyncio.gather(
            *(client.generate(p, temperature=0, max_tokens=count, ignore_eos=True, adapter=name) for p, name in ask)
        )
        expected = [
            peft_tokens(model, None if name is None else adapters[name], prompt, count)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        assert [list(one.token_ids) for one in done] == expected
        # Again, on a fresh executor: it loads them before it serves.
        cluster.executors[-1].kill()
        cluster.start_model_executor(model, num_blocks_override=256, memory_limit="2GiB", max_loras=3, max_lora_rank=8)
        again = await client.generate(prompts[2], temperature=0, max_tokens=count, ignore_eos=True, adapter="mlp")
        assert list(again.token_ids) == expected[2]
