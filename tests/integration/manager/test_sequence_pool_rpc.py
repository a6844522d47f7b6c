"""The block-table API over gRPC, through the client library and as bare messages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import kv_manager_service_pb2_grpc
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pb
from kvplane_client import (
    AlreadyExistsError,
    AsyncClient,
    BlockShortage,
    Client,
    CloseSequence,
    CommitSequence,
    ExtendSequence,
    FailedPreconditionError,
    ForkSequence,
    InvalidArgumentError,
    MultimodalItem,
    NotFoundError,
    OpenSequence,
    PromptEmbedding,
    ResourceExhaustedError,
    SequenceDone,
    SequenceOperation,
    SequencePool,
    SequenceTable,
    TokenSpan,
)

from kvmanager_service import sequence_pools
from kvmanager_service.core.sequence_pool import MAX_SPANS
from kvmanager_service.servicers import sequences
from tests.integration.manager.fake_engine import Manager, details, running_manager


@pytest.fixture
async def client(manager: Manager) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{manager.server.port}") as made:
        yield made


@pytest.fixture
async def pool(client: AsyncClient) -> AsyncIterator[SequencePool]:
    async with await client.open_pool(9, 4, pool_id="p") as made:
        yield made


async def test_one_step_of_an_engine_is_one_call(pool: SequencePool) -> None:
    opened = await pool.update([OpenSequence("a", range(6))])
    assert opened == [SequenceTable(opened[0].block_ids, 0)]  # type: ignore[union-attr]
    done, extended, forked, branch = await pool.update(
        [
            CommitSequence("a", 6),
            ExtendSequence("a", [6]),
            ForkSequence("a", "b"),
            ExtendSequence("b", [7]),
        ]
    )
    assert done == SequenceDone()
    assert isinstance(extended, SequenceTable)
    assert isinstance(forked, SequenceTable)
    assert isinstance(branch, SequenceTable)
    assert extended == opened[0] or extended.num_computed_tokens == 6
    assert forked.num_computed_tokens == 6
    assert forked.block_ids is branch.block_ids, "a table is what it is after the batch"
    assert branch.copies == ((extended.block_ids[1], branch.block_ids[1]),)
    assert branch.block_ids[0] == extended.block_ids[0]


async def test_extend_commits_first_if_asked(pool: SequencePool) -> None:
    await pool.update([OpenSequence("a", range(16)), OpenSequence("b", range(100, 116))])
    short, wrong = await pool.update(
        [ExtendSequence("a", [1], num_computed_tokens=16), ExtendSequence("b", num_computed_tokens=17)]
    )
    assert isinstance(short, BlockShortage)
    assert isinstance(wrong, InvalidArgumentError)
    closed, found = await pool.update([CloseSequence("a"), OpenSequence("c", range(16))])
    assert closed == SequenceDone()
    assert isinstance(found, SequenceTable)
    assert found.num_computed_tokens == 12, "the commit stands"


async def test_what_extend_commits_stands_when_the_rest_is_refused(pool: SequencePool) -> None:
    await pool.update([OpenSequence("a", range(6)), OpenSequence("b", range(6))])
    refused, closed, found = await pool.update(
        [ExtendSequence("a", num_slots=3, num_computed_tokens=6), CloseSequence("a"), OpenSequence("c", range(6))]
    )
    assert isinstance(refused, InvalidArgumentError)
    assert closed == SequenceDone()
    assert isinstance(found, SequenceTable)
    assert found.num_computed_tokens == 4


async def test_one_refused_operation_disturbs_no_other(pool: SequencePool) -> None:
    results = await pool.update(
        [
            OpenSequence("a", range(4)),
            OpenSequence("a", range(4)),
            CommitSequence("a", 5),
            ExtendSequence("nobody"),
            OpenSequence("", [1]),
            OpenSequence("b", [-1]),
            OpenSequence("b", [1], lora_revision="1"),
            OpenSequence("b", range(99)),
            ExtendSequence("a", num_slots=-1),
            CommitSequence("a", 4),
        ]
    )
    kinds = [type(result) for result in results]
    assert kinds == [
        SequenceTable,
        AlreadyExistsError,
        InvalidArgumentError,
        NotFoundError,
        InvalidArgumentError,
        InvalidArgumentError,
        InvalidArgumentError,
        InvalidArgumentError,
        InvalidArgumentError,
        SequenceDone,
    ]
    assert "expected" in str(results[2])


async def test_a_shortage_comes_with_advice(pool: SequencePool) -> None:
    await pool.update([OpenSequence("a", range(16)), OpenSequence("b", range(100, 116))])
    assert await pool.update([ExtendSequence("a", [1])]) == [BlockShortage(1, 0, ("b",))]
    closed, extended = await pool.update([CloseSequence("b"), ExtendSequence("a", [1])])
    assert closed == SequenceDone()
    assert isinstance(extended, SequenceTable)
    assert len(extended.block_ids) == 5


async def test_an_operation_that_is_empty_is_refused(manager: Manager, pool: SequencePool) -> None:
    stub = kv_manager_service_pb2_grpc.KvManagerServiceStub(manager.channel)
    request = pb.UpdateSequencesRequest(pool_id="p", batch_id=1, operations=[pb.SequenceOperation()])
    response = await stub.UpdateSequences(request)
    assert response.results[0].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_half_a_token_is_refused(manager: Manager, pool: SequencePool) -> None:
    stub = kv_manager_service_pb2_grpc.KvManagerServiceStub(manager.channel)
    half = pb.OpenSequence(sequence_id="a", token_ids=common_pb2.Int32Array(data=b"\0\0\0\0\0\0"))
    request = pb.UpdateSequencesRequest(pool_id="p", batch_id=1, operations=[pb.SequenceOperation(open=half)])
    assert "whole number" in (await stub.UpdateSequences(request)).results[0].error.message


async def test_a_batch_sent_again_is_not_applied_again(manager: Manager, pool: SequencePool) -> None:
    stub = kv_manager_service_pb2_grpc.KvManagerServiceStub(manager.channel)

    def batch(batch_id: int, name: str) -> pb.UpdateSequencesRequest:
        tokens = common_pb2.Int32Array(data=bytes(16))
        opened = pb.OpenSequence(sequence_id=name, token_ids=tokens)
        return pb.UpdateSequencesRequest(pool_id="p", batch_id=batch_id, operations=[pb.SequenceOperation(open=opened)])

    first = await stub.UpdateSequences(batch(1, "a"))
    assert await stub.UpdateSequences(batch(1, "a")) == first
    for stale in (batch(1, "b"), batch(3, "b"), batch(0, "b")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.UpdateSequences(stale)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert details(refused.value)[0] == "STALE_BATCH"
    assert (await stub.UpdateSequences(batch(2, "b"))).results[0].WhichOneof("result") == "table"


# --- what decides K/V beside tokens -------------------------------------------------------------------------------

CAT, DOG = sha256(b"cat").digest(), sha256(b"dog").digest()
PROMPT = [1, 2, 3, *[99] * 6, 4, 5, 6, 7]
"""Text, the six placeholders of an image, text: three blocks of 4 and a token."""
IMAGE = MultimodalItem(CAT, 3, 6)


async def found(pool: SequencePool, *spans: TokenSpan, token_ids: Sequence[int] = PROMPT, **options: Any) -> int:
    """How many tokens of a sequence the cache has."""
    opened, closed = await pool.update([OpenSequence("asks", token_ids, spans=spans, **options), CloseSequence("asks")])
    assert isinstance(opened, SequenceTable), opened
    assert closed == SequenceDone()
    return opened.num_computed_tokens


async def computed(pool: SequencePool, *spans: TokenSpan, **options: Any) -> None:
    """A sequence that the engine has computed, and ended."""
    results = await pool.update(
        [OpenSequence("first", PROMPT, spans=spans, **options), CommitSequence("first", 13), CloseSequence("first")]
    )
    assert [type(result) for result in results] == [SequenceTable, SequenceDone, SequenceDone]


@pytest.mark.parametrize("kind", [MultimodalItem, PromptEmbedding])
async def test_what_a_span_covers_is_hit_by_the_same_one_at_the_same_place_alone(
    client: AsyncClient, kind: type[MultimodalItem] | type[PromptEmbedding]
) -> None:
    """Two images have the same placeholders, and embeddings have any: their ids say nothing."""
    pool = await client.open_pool(33, 4)
    await computed(pool, kind(CAT, 3, 6))
    assert await found(pool, kind(CAT, 3, 6)) == 12
    assert await found(pool) == 0
    assert await found(pool, kind(DOG, 3, 6)) == 0
    other = PromptEmbedding if kind is MultimodalItem else MultimodalItem
    assert await found(pool, other(CAT, 3, 6)) == 0
    for moved in (kind(CAT, 4, 6), kind(CAT, 2, 6), kind(CAT, 3, 5)):
        assert await found(pool, moved) == 0
    assert await found(pool, kind(CAT, 3, 3), kind(CAT, 6, 3)) == 0


async def test_text_before_an_item_is_shared_whatever_the_item(client: AsyncClient) -> None:
    pool = await client.open_pool(33, 4)
    await computed(pool, MultimodalItem(CAT, 4, 4))
    assert await found(pool, MultimodalItem(DOG, 4, 4)) == await found(pool) == 4
    assert await found(pool, MultimodalItem(CAT, 4, 4), MultimodalItem(DOG, 9, 1)) == 8


async def test_lora_tenant_and_item_named_like_a_salt_share_nothing_with_it(client: AsyncClient) -> None:
    pool = await client.open_pool(33, 4)
    await computed(pool, cache_salt="x" * 32)
    assert await found(pool, cache_salt="x" * 32) == 12
    assert await found(pool, lora_id="x" * 32) == await found(pool, lora_id="a", lora_revision="x" * 32) == 0
    assert await found(pool, MultimodalItem(b"x" * 32, 0, 1)) == await found(pool, tenant="x" * 32) == 0
    await computed(pool, IMAGE, cache_salt="s", lora_id="a", lora_revision="1")
    assert await found(pool, IMAGE, cache_salt="s", lora_id="a", lora_revision="1") == 12
    assert await found(pool, IMAGE, cache_salt="s", lora_id="a", lora_revision="2") == 0
    assert await found(pool, IMAGE, lora_id="a", lora_revision="1") == await found(pool, IMAGE) == 0


async def test_an_image_in_a_later_turn_comes_with_its_tokens(client: AsyncClient) -> None:
    pool = await client.open_pool(33, 4)
    early, late = IMAGE, MultimodalItem(DOG, 14, 5)
    turn = [8, *[99] * 5, 9]
    results = await pool.update(
        [
            OpenSequence("a", PROMPT, spans=[early]),
            ExtendSequence("a", turn, spans=[late], num_computed_tokens=13),
            CommitSequence("a", 20),
        ]
    )
    assert [type(result) for result in results] == [SequenceTable, SequenceTable, SequenceDone]
    whole = [*PROMPT, *turn, 10]
    assert await found(pool, early, late, token_ids=whole) == 20
    assert await found(pool, early, token_ids=whole) == 12
    assert await found(pool, early, MultimodalItem(CAT, 14, 5), token_ids=whole) == 12


async def test_a_branch_and_a_resumed_sequence_have_the_spans_of_their_tokens(client: AsyncClient) -> None:
    pool = await client.open_pool(33, 4)
    second = MultimodalItem(DOG, 10, 2)
    await pool.update([OpenSequence("a", PROMPT, spans=[IMAGE, second], cache_salt="s"), CommitSequence("a", 13)])
    forked, refused, extended, committed, closed = await pool.update(
        [
            ForkSequence("a", "b", 9),
            ForkSequence("a", "c", 5),
            ExtendSequence("b", [7, 7, 7, 7]),
            CommitSequence("b", 13),
            CloseSequence("a"),
        ]
    )
    assert isinstance(forked, SequenceTable)
    assert isinstance(extended, SequenceTable)
    assert committed == closed == SequenceDone()
    assert isinstance(refused, InvalidArgumentError)
    assert refused.message == (
        "num_tokens: expected none from 4 to 8, within a span, got 5; fork where it begins or ends"
    )
    branch = [*PROMPT[:9], 7, 7, 7, 7]
    assert await found(pool, IMAGE, token_ids=branch, cache_salt="s") == 12
    assert await found(pool, IMAGE, second, token_ids=branch, cache_salt="s") == 8
    assert await found(pool, IMAGE, second, cache_salt="s", is_resumed=True) == 12


BAD_SPANS: list[tuple[list[pb.TokenSpan], str, str]] = [
    ([pb.TokenSpan(digest=CAT, offset=0, length=1)], "spans[0].kind", "MULTIMODAL_ITEM or PROMPT_EMBEDDING, got 0"),
    ([pb.TokenSpan(kind=7, digest=CAT, length=1)], "spans[0].kind", "got 7"),  # type: ignore[arg-type]
    ([pb.TokenSpan(kind=1, digest=CAT[:15], length=1)], "spans[0].digest", "16 to 64 bytes, got 15"),
    ([pb.TokenSpan(kind=1, digest=bytes(65), length=1)], "spans[0].digest", "16 to 64 bytes, got 65"),
    ([pb.TokenSpan(kind=1, length=1)], "spans[0].digest", "got 0"),
    ([pb.TokenSpan(kind=1, digest=CAT)], "spans[0].length", "at least 1 token, got 0"),
    ([pb.TokenSpan(kind=1, digest=CAT, length=-1)], "spans[0].length", "got -1"),
    ([pb.TokenSpan(kind=1, digest=CAT, offset=-1, length=1)], "spans[0].offset", "got -1"),
    ([pb.TokenSpan(kind=1, digest=CAT, offset=0, length=7)], "spans[0].length", "an end at 6"),
    ([pb.TokenSpan(kind=2, digest=CAT, offset=2**31 - 1, length=2**31 - 1)], "spans[0].length", "one at 4294967294"),
    (
        [pb.TokenSpan(kind=1, digest=CAT, length=2), pb.TokenSpan(kind=2, digest=CAT, offset=1, length=1)],
        "spans[1].offset",
        "at least 2 (where the span before it ends), got 1; they come in order, without overlap",
    ),
    (
        [pb.TokenSpan(kind=1, digest=CAT, offset=4, length=1), pb.TokenSpan(kind=1, digest=CAT, length=1)],
        "spans[1].offset",
        "at least 5",
    ),
    ([pb.TokenSpan(kind=1, digest=CAT, length=1)] * (MAX_SPANS + 1), "spans", f"at most {MAX_SPANS} in a sequence"),
]


@pytest.mark.parametrize(("spans", "field", "told"), BAD_SPANS, ids=[f"{bad[1]}-{bad[2][:24]}" for bad in BAD_SPANS])
async def test_a_bad_span_is_refused_by_name_and_changes_nothing(
    manager: Manager, spans: list[pb.TokenSpan], field: str, told: str
) -> None:
    """In open, and in extend, whose spans are of the tokens that it brings."""
    stub = kv_manager_service_pb2_grpc.KvManagerServiceStub(manager.channel)
    await stub.OpenPool(pb.OpenPoolRequest(pool_id="p", num_blocks=9, block_size=4))
    six = common_pb2.Int32Array(data=bytes(24))
    opening = pb.OpenSequence(sequence_id="a", token_ids=six, spans=spans)
    good = pb.OpenSequence(sequence_id="b", token_ids=six)
    extending = pb.ExtendSequence(sequence_id="b", token_ids=six, spans=spans)
    for span in extending.spans:  # of the next six tokens, to be as bad there
        span.offset += 6 if span.offset < 6 else 0
    answer = await stub.UpdateSequences(
        pb.UpdateSequencesRequest(
            pool_id="p",
            batch_id=1,
            operations=[
                pb.SequenceOperation(open=opening),
                pb.SequenceOperation(open=good),
                pb.SequenceOperation(extend=extending),
            ],
        )
    )
    for result in (answer.results[0], answer.results[2]):
        assert result.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert result.error.reason == "INVALID_PARAMETER"
        assert result.error.message.startswith(f"{field}: expected ")
    assert told in answer.results[0].error.message
    assert answer.results[1].WhichOneof("result") == "table"
    (info,) = (await stub.ListPools(pb.ListPoolsRequest())).pools
    assert (info.num_sequences, info.free_blocks) == (1, 6), "b and its six tokens"


async def test_a_span_of_tokens_that_were_known_before_is_refused(pool: SequencePool) -> None:
    """Blocks of them may be hashed, and hit, without it."""
    opened, late, ahead = await pool.update(
        [
            OpenSequence("a", PROMPT),
            ExtendSequence("a", [1, 2], spans=[MultimodalItem(CAT, 12, 1)]),
            ExtendSequence("a", [1, 2], spans=[MultimodalItem(CAT, 14, 2)]),
        ]
    )
    assert isinstance(opened, SequenceTable)
    assert isinstance(late, InvalidArgumentError)
    assert late.message.startswith(
        "spans[0].offset: expected at least 13 (the first of the tokens that they come with)"
    )
    assert isinstance(ahead, InvalidArgumentError)
    assert ahead.message.startswith("spans[0].length: expected an end at 15")
    assert late.metadata["field"] == "spans[0].offset"


async def test_a_manager_that_knows_no_spans_is_not_sent_any(pool: SequencePool) -> None:
    """It would ignore them, and take two images for one."""
    assert pool.info.max_spans == MAX_SPANS
    pool.info = dataclasses.replace(pool.info, max_spans=0)
    for operation in (OpenSequence("a", PROMPT, spans=[IMAGE]), ExtendSequence("b", [1], spans=[IMAGE])):
        with pytest.raises(FailedPreconditionError, match="upgrade the manager"):
            await pool.update([OpenSequence("b", PROMPT), operation])
    (opened,) = await pool.update([OpenSequence("b", PROMPT)])
    assert isinstance(opened, SequenceTable)
    assert pool.recovered == []


async def test_a_span_that_cannot_be_sent_is_refused_before_it_is(pool: SequencePool) -> None:
    for span in (MultimodalItem("cat" * 8, 0, 1), MultimodalItem(CAT, 1 << 40, 1), (CAT, 0, 1)):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="OpenSequence: expected values that fit the contract"):
            await pool.update([OpenSequence("a", PROMPT, spans=[span])])  # type: ignore[list-item]
    assert isinstance((await pool.update([OpenSequence("a", PROMPT)]))[0], SequenceTable)


async def test_the_synchronous_client_sends_spans_and_tenants_too(manager: Manager) -> None:
    def engine() -> list[int]:
        hits = []
        with Client(f"127.0.0.1:{manager.server.port}") as client, client.open_pool(33, 4) as pool:
            assert pool.info.max_spans == MAX_SPANS
            pool.update([OpenSequence("a", PROMPT, spans=[IMAGE], tenant="t"), CommitSequence("a", 13)])
            for name, span in (("b", IMAGE), ("c", MultimodalItem(DOG, 3, 6)), ("d", PromptEmbedding(CAT, 3, 6))):
                (opened,) = pool.update([OpenSequence(name, PROMPT, spans=[span])])
                assert isinstance(opened, SequenceTable)
                hits.append(opened.num_computed_tokens)
        return hits

    assert await asyncio.to_thread(engine) == [12, 0, 0]


@pytest.mark.parametrize("isolate", [True, False])
async def test_tenants_of_an_engine_share_no_blocks_where_they_are_isolated(isolate: bool) -> None:
    """With items and without; a tenant named like a salt is none."""
    async with (
        running_manager(isolate_tenants=isolate) as manager,
        AsyncClient(f"127.0.0.1:{manager.server.port}") as client,
        await client.open_pool(33, 4) as pool,
    ):
        assert pool.info.isolate_tenants is isolate
        others = 0 if isolate else 12
        for spans in ((), (IMAGE,)):
            await computed(pool, *spans, tenant="a")
            assert await found(pool, *spans, tenant="a") == 12
            assert await found(pool, *spans, tenant="b") == await found(pool, *spans) == others
            assert await found(pool, *spans, cache_salt="a") == 0
        (refused,) = await pool.update([OpenSequence("x", PROMPT, tenant="t" * 257)])
        assert isinstance(refused, InvalidArgumentError)
        assert refused.metadata["field"] == "tenant"


async def lose_answer(pool: SequencePool, *operations: SequenceOperation) -> None:
    """Cancel an update when the manager has applied it and before the pool hears of that."""
    send, lost = pool._update, pool._unanswered
    applied = asyncio.Event()

    async def hold_back(request: pb.UpdateSequencesRequest) -> pb.UpdateSequencesResponse:
        response = await send(request)
        if lost is not None and request is lost[0]:
            return response
        applied.set()
        return await asyncio.Future()

    pool._update = hold_back
    update = asyncio.create_task(pool.update(operations))
    await applied.wait()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    pool._update = send


async def test_an_update_that_is_cancelled_costs_the_pool_nothing(pool: SequencePool) -> None:
    await pool.update([OpenSequence("a", range(6)), CommitSequence("a", 6), ForkSequence("a", "b")])
    await lose_answer(pool, ExtendSequence("b", [6]))
    (extended,) = await pool.update([ExtendSequence("b", [7, 8])])
    assert isinstance(extended, SequenceTable)
    assert len(extended.block_ids) == 3, "the second block, which the lost batch copied, and one more"
    assert extended.copies == ()
    ((operation, recovered),) = pool.recovered
    assert operation == ExtendSequence("b", [6])
    assert isinstance(recovered, SequenceTable)
    assert [target for _, target in recovered.copies] == [extended.block_ids[1]], "the engine still has to make it"
    assert await pool.update([CloseSequence("a"), CloseSequence("b")]) == [SequenceDone()] * 2
    assert pool.recovered == []


async def test_what_was_recovered_is_kept_until_an_update_returns(pool: SequencePool) -> None:
    await lose_answer(pool, OpenSequence("a", range(6)))
    await lose_answer(pool, CommitSequence("a", 6))
    assert [type(operation) for operation, _ in pool.recovered] == [OpenSequence]
    await lose_answer(pool, CloseSequence("a"))
    assert await pool.update() == []
    assert [type(operation) for operation, _ in pool.recovered] == [OpenSequence, CommitSequence, CloseSequence]


async def test_a_batch_that_is_refused_as_a_whole_is_not_sent_again(pool: SequencePool) -> None:
    with pytest.raises(InvalidArgumentError, match="operations"):
        await pool.update([CloseSequence("a")] * (sequences.MAX_OPERATIONS + 1))
    with pytest.raises(InvalidArgumentError, match="OpenSequence"):
        await pool.update([OpenSequence("a", [1 << 40])])
    (opened,) = await pool.update([OpenSequence("a", range(4))])
    assert isinstance(opened, SequenceTable)
    assert pool.recovered == []


async def test_a_table_grows_in_place(pool: SequencePool) -> None:
    (opened,) = await pool.update([OpenSequence("a", range(6))])
    assert isinstance(opened, SequenceTable)
    before = list(opened.block_ids)
    (extended,) = await pool.update([ExtendSequence("a", [6, 7, 8])])
    assert isinstance(extended, SequenceTable)
    assert extended.block_ids is opened.block_ids, "no step costs as much as its context is long"
    assert (extended.first_block, extended.block_ids[:2]) == (2, before)
    _, forked = await pool.update([CommitSequence("a", 9), ForkSequence("a", "b", 8)])
    assert isinstance(forked, SequenceTable)
    assert forked.block_ids is not opened.block_ids
    assert (forked.first_block, forked.block_ids) == (0, before)


async def test_there_is_a_limit_to_sequences(pool: SequencePool) -> None:
    await pool.update([OpenSequence("a", range(4)), CommitSequence("a", 4)])
    *forked, refused = await pool.update([ForkSequence("a", f"b{number}") for number in range(8)])
    assert all(isinstance(result, SequenceTable) for result in forked)
    assert isinstance(refused, ResourceExhaustedError)
    assert refused.reason == "TOO_MANY_SEQUENCES"


async def test_there_is_a_limit_to_an_answer(pool: SequencePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MAX_ANSWER_BYTES", 1)
    opened, refused, committed, closed = await pool.update(
        [
            OpenSequence("a", range(4)),
            ExtendSequence("a", [1], num_computed_tokens=4),
            CommitSequence("a", 4),
            CloseSequence("a"),
        ]
    )
    assert isinstance(opened, SequenceTable)
    assert isinstance(refused, ResourceExhaustedError)
    assert refused.reason == "BATCH_TOO_LARGE"
    assert committed == closed == SequenceDone()


async def test_a_pool_whose_name_was_drawn_is_opened_even_if_an_answer_is_lost(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client._calls.unary

    async def call_twice(method: Any, request: Any) -> Any:
        if isinstance(request, pb.OpenPoolRequest):
            await call(method, request)
        return await call(method, request)

    monkeypatch.setattr(client._calls, "unary", call_twice)
    made = await client.open_pool(5, 4)
    assert [info.pool_id for info in await client.list_pools()] == [made.info.pool_id]
    assert made.info.num_blocks == 5
    (opened,) = await made.update([OpenSequence("a", [1])])
    assert isinstance(opened, SequenceTable)
    with pytest.raises(AlreadyExistsError):
        await client.open_pool(5, pool_id="mine")


async def test_a_drawn_name_that_is_still_being_made_is_drawn_anew(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client._calls.unary
    drawn: list[str] = []

    async def refuse_once(method: Any, request: Any) -> Any:
        if isinstance(request, pb.OpenPoolRequest):
            drawn.append(request.pool_id)
            if len(drawn) == 1:
                raise AlreadyExistsError("being made")
        return await call(method, request)

    monkeypatch.setattr(client._calls, "unary", refuse_once)
    made = await client.open_pool(5, 4)
    assert made.info.pool_id == drawn[1] != drawn[0]


async def test_pools_are_listed_and_closed(client: AsyncClient, pool: SequencePool) -> None:
    await pool.update([OpenSequence("a", range(6)), CommitSequence("a", 6), OpenSequence("b", range(6))])
    (info,) = await client.list_pools()
    assert (info.pool_id, info.num_blocks, info.block_size, info.num_sequences) == ("p", 9, 4, 2)
    assert (info.free_blocks, info.cached_blocks, info.prefix_queries, info.prefix_hits) == (5, 1, 12, 4)
    assert 0 < info.lease_remaining_seconds <= info.lease_seconds == 60
    assert info.last_batch_id == 1
    await pool.update([CloseSequence("a"), OpenSequence("a", range(7), is_resumed=True)])
    (info,) = await client.list_pools()
    assert (info.num_sequences, info.prefix_queries, info.prefix_hits) == (2, 12, 4)
    other = await client.open_pool(4)
    await other.close()
    with pytest.raises(NotFoundError, match="lease"):
        await other.update([OpenSequence("a", [1])])
    assert [info.pool_id for info in await client.list_pools()] == ["p"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": 1},
        {"num_blocks": 8, "block_size": 5_000},
        {"num_blocks": 8, "block_size": -1},
        {"num_blocks": 8, "eviction_policy": "best"},
        {"num_blocks": 8, "lease_seconds": 0.5},
        {"num_blocks": 8, "pool_id": "x" * 129},
    ],
    ids=str,
)
async def test_bad_pools_are_refused(client: AsyncClient, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        await client.open_pool(**wrong)  # type: ignore[arg-type]
    assert await client.list_pools() == []


async def test_the_commit_of_an_extend_stands_whatever_is_wrong_with_the_rest(manager: Manager) -> None:
    stub = kv_manager_service_pb2_grpc.KvManagerServiceStub(manager.channel)
    await stub.OpenPool(pb.OpenPoolRequest(pool_id="p", num_blocks=9, block_size=4))
    six = common_pb2.Int32Array(data=bytes(24))
    for index, bad in enumerate(
        ({"spans": [pb.TokenSpan(kind=7)]}, {"spans": [pb.TokenSpan(kind=1)]}, {"num_slots": -1})
    ):
        name = f"a{index}"
        operations = [
            pb.SequenceOperation(open=pb.OpenSequence(sequence_id=name, token_ids=six, cache_salt=name)),
            pb.SequenceOperation(
                extend=pb.ExtendSequence(sequence_id=name, token_ids=six, num_computed_tokens=5, **bad)  # type: ignore[arg-type]
            ),
            pb.SequenceOperation(fork=pb.ForkSequence(sequence_id=name, new_sequence_id=f"b{index}", num_tokens=5)),
            pb.SequenceOperation(close=pb.CloseSequence(sequence_id=name)),
            pb.SequenceOperation(close=pb.CloseSequence(sequence_id=f"b{index}")),
        ]
        request = pb.UpdateSequencesRequest(pool_id="p", batch_id=index + 1, operations=operations)
        results = (await stub.UpdateSequences(request)).results
        assert [result.WhichOneof("result") for result in results] == ["table", "error", "table", "done", "done"]


async def test_there_is_a_limit_to_pools_and_to_their_blocks(client: AsyncClient, pool: SequencePool) -> None:
    with pytest.raises(AlreadyExistsError):
        await client.open_pool(4, pool_id="p")
    with pytest.raises(ResourceExhaustedError, match="max-pool-blocks"):
        await client.open_pool(1_048_576)
    for _ in range(15):
        await client.open_pool(2)
    with pytest.raises(ResourceExhaustedError, match="max-pools"):
        await client.open_pool(2)


async def test_a_large_pool_is_made_beside_the_loop(client: AsyncClient) -> None:
    made, refused = await asyncio.gather(
        client.open_pool(sequence_pools.BLOCKS_MADE_AT_ONCE + 1, pool_id="q"),
        client.open_pool(2, pool_id="q"),
        return_exceptions=True,
    )
    outcomes = sorted(type(outcome).__name__ for outcome in (made, refused))
    assert outcomes == ["AlreadyExistsError", "SequencePool"]


async def test_a_pool_whose_engine_is_gone_is_dropped(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_pools, "MIN_LEASE_MS", 1)
    kept = await client.open_pool(4, pool_id="kept")
    left = await client.open_pool(4, pool_id="left", lease_seconds=0.02)
    while len(await client.list_pools()) > 1:  # noqa: ASYNC110 - the server has no event to wait for
        await asyncio.sleep(0.01)
    assert (await client.list_pools())[0].pool_id == "kept"
    with pytest.raises(NotFoundError):
        await left.update()
    assert await kept.update() == []


async def test_a_broken_pool_is_dropped_and_no_other(
    client: AsyncClient, pool: SequencePool, monkeypatch: pytest.MonkeyPatch, manager: Manager
) -> None:
    other = await client.open_pool(4, pool_id="other")

    def fail(*_: object) -> None:
        raise AssertionError("a broken invariant")

    with monkeypatch.context() as patch:
        patch.setattr("kvmanager_service.core.sequence_pool.SequencePool.close", fail)
        await pool.update([OpenSequence("a", [1])])
        stub = kv_manager_service_pb2_grpc.KvManagerServiceStub(manager.channel)
        closing = pb.SequenceOperation(close=pb.CloseSequence(sequence_id="a"))
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await stub.UpdateSequences(pb.UpdateSequencesRequest(pool_id="p", batch_id=2, operations=[closing]))
        assert broken.value.code() is grpc.StatusCode.INTERNAL
    assert [info.pool_id for info in await client.list_pools()] == ["other"]
    await other.update([OpenSequence("a", [1])])
    await client.open_pool(4, pool_id="p")  # for the fixture to close
