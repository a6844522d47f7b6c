import asyncio
import dataclasses
import threading
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.base import BackendError, RowLogprobs, StepBatch, StepResult
from executor_service.backends.sim_digest import expected_tokens
from executor_service.server import SERVICE_NAME, ExecutorServer, running_executor
from executor_service.step_runner import MAX_QUEUED_STEPS
from tests.unit.executor_shell.executor_backends import DEADLOCK_S, BrokenBackend, HeldBackend
from tests.unit.executor_shell.executor_builders import (
    VOCAB_SIZE,
    Row,
    column,
    connected,
    error_info,
    greedy,
    make_step,
    sim_config,
    values_of,
)

PROMPT = [11, 12, 13, 14, 15]
TABLE = [5, 2, 9, 7, 30, 31, 32]


def oracle(prompt, count, **values):
    return expected_tokens(prompt, count, vocab_size=VOCAB_SIZE, **values)


@asynccontextmanager
async def executing(backend):
    """An executor with a cache; yields server, client and epoch."""
    async with running_executor(sim_config(), backend) as server, connected(server.address) as client:
        yield server, client, await client.handshake()


@asynccontextmanager
async def holding():
    """The same, where each step waits until the test lets it go."""
    backend = HeldBackend()
    backend.load_gate.set()
    async with executing(backend) as (server, client, epoch):
        try:
            yield backend, server, client, epoch
        finally:
            backend.open()


async def until(condition):
    """Wait for what another task or thread will do."""
    async with asyncio.timeout(DEADLOCK_S):
        # The condition belongs to the code under test, which has no event to wait for.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def step_started(backend):
    assert await asyncio.to_thread(backend.started.acquire, timeout=DEADLOCK_S)


def decode(step_id, epoch, position, **values):
    return make_step(step_id, epoch, [Row([1], TABLE, start=position)], **values)


async def test_execute_step_by_step_gives_the_oracles_tokens():
    async with executing(None) as (_, client, epoch):
        stream = client.execute()
        response = await stream.step(make_step(1, epoch, [Row(PROMPT, TABLE)]))
        tokens = values_of(response.sampled_token_ids)
        while len(tokens) < 8:
            row = Row(tokens[-1:], TABLE, start=len(PROMPT) + len(tokens) - 1)
            response = await stream.step(make_step(len(tokens) + 1, epoch, [row]))
            assert (response.step_id, response.kv_epoch) == (len(tokens) + 1, epoch)
            assert values_of(response.computed_upto) == [len(PROMPT) + len(tokens)]
            tokens += values_of(response.sampled_token_ids)
        await stream.close()
        assert tokens == oracle(PROMPT, 8)


async def test_execute_fed_steps_two_queued_give_the_oracles_tokens():
    """Two sequences, prefilled one after the other; every later step is sent before its input is known."""
    other, other_table = [21, 22], [40, 41, 42]
    params = greedy(temperature=1.0, presence_penalty=1.0)
    async with executing(None) as (_, client, epoch):
        stream = client.execute()
        steps = [
            make_step(1, epoch, [Row(other, other_table, params=params, seed=4, history=(other, 2))]),
            make_step(
                2,
                epoch,
                [Row(PROMPT, TABLE), Row([0], other_table, start=2, feed=0, samples=False)],
                feeds_from_step_id=1,
            ),
        ]
        steps += [
            make_step(
                step, epoch, [Row([-1], TABLE, start=len(PROMPT) + step - 3, feed=0)], feeds_from_step_id=step - 1
            )
            for step in range(3, 13)
        ]
        responses = []
        await stream.send(steps[0])
        for step in steps[1:]:
            await stream.send(step)
            responses.append(await stream.receive())
        responses.append(await stream.receive())
        await stream.close()
    tokens = [values_of(response.sampled_token_ids) for response in responses]
    assert tokens[0] == oracle(other, 1, seed=4, temperature=1.0, penalised=True)
    assert [token for (token,) in tokens[1:]] == oracle(PROMPT, 11)
    assert [response.step_id for response in responses] == list(range(1, 13))


async def test_execute_fed_token_counts_in_the_penalty_history():
    params = greedy(presence_penalty=1.0)
    async with executing(None) as (_, client, epoch):
        stream = client.execute()
        history = (PROMPT, len(PROMPT))
        await stream.send(make_step(1, epoch, [Row(PROMPT, TABLE, params=params, history=history)]))
        row = Row([0], TABLE, start=len(PROMPT), feed=0, params=params, history=history)
        await stream.send(make_step(2, epoch, [row], feeds_from_step_id=1))
        tokens = [values_of((await stream.receive()).sampled_token_ids)[0] for _ in range(2)]
    assert tokens == oracle(PROMPT, 2, penalised=True)


async def test_execute_rows_share_a_prefix_filled_in_the_same_step():
    async with executing(None) as (_, client, epoch):
        shared = list(range(50, 58))
        rows = [Row([1, 2], [3, 4, 6], start=8), Row([9], [3, 4, 8], start=8), Row(shared, [3, 4])]
        response = await client.execute().step(make_step(1, epoch, rows))
        expected = [oracle([*shared, *tail], 1)[0] for tail in ([1, 2], [9], [])]
        assert values_of(response.sampled_token_ids) == expected
        assert values_of(response.computed_upto) == [10, 9, 8]


async def test_execute_logprobs_come_for_rows_that_asked():
    async with executing(None) as (_, client, epoch):
        rows = [Row([1], [1]), Row([2], [2], params=greedy(num_logprobs=0)), Row([3], [3], samples=False)]
        response = await client.execute().step(make_step(1, epoch, rows))
        assert values_of(response.logprobs.indptr) == [0, 0, 1]
        assert values_of(response.logprobs.token_ids) == values_of(response.sampled_token_ids)[1:]
        assert np.frombuffer(response.logprobs.logprobs.data, dtype="<f4").tolist() == [0.0]
        response = await client.execute().step(make_step(1, epoch, rows[:1]))
        assert not response.HasField("logprobs")


async def test_execute_step_without_sampling_and_step_without_rows():
    async with executing(None) as (_, client, epoch):
        stream = client.execute()
        response = await stream.step(make_step(1, epoch, [Row(PROMPT, TABLE, samples=False)]))
        assert (values_of(response.sampled_token_ids), values_of(response.computed_upto)) == ([], [5])
        response = await stream.step(make_step(2, epoch, []))
        assert (values_of(response.sampled_token_ids), values_of(response.computed_upto)) == ([], [])


async def test_execute_runs_in_one_thread_that_is_not_the_event_loops():
    backend = HeldBackend().open()
    async with executing(backend) as (_, client, epoch):
        for _ in range(2):
            stream = client.execute()
            await stream.step(make_step(1, epoch, [Row([1], [1])]))
            await stream.close()
    assert len(backend.threads) == 1
    assert threading.get_ident() not in backend.threads


REFUSED = {
    "stale-epoch": (lambda e: decode(2, e ^ 1, 5), grpc.StatusCode.ABORTED, "STALE_EPOCH"),
    "step-0": (lambda e: decode(0, e, 5), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    "step-again": (lambda e: decode(1, e, 5), grpc.StatusCode.ABORTED, "STALE_STEP"),
    "malformed": (
        lambda e: pb.ExecuteRequest(step_id=2, kv_epoch=e, query_indptr=column([0, 1])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
    ),
    "no-indptr": (
        lambda e: pb.ExecuteRequest(step_id=2, kv_epoch=e),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
    ),
    "feed-of-other-step": (
        lambda e: make_step(3, e, [Row([0], TABLE, start=5, feed=0)], feeds_from_step_id=2),
        grpc.StatusCode.FAILED_PRECONDITION,
        "FEED_NOT_KEPT",
    ),
    "feed-of-step-0": (
        lambda e: make_step(2, e, [Row([0], TABLE, start=5, feed=0)], feeds_from_step_id=0),
        grpc.StatusCode.FAILED_PRECONDITION,
        "FEED_NOT_KEPT",
    ),
    "feed-step-without-rows": (
        lambda e: decode(2, e, 5, feeds_from_step_id=7),
        grpc.StatusCode.FAILED_PRECONDITION,
        "FEED_NOT_KEPT",
    ),
    "feed-beyond": (
        lambda e: make_step(2, e, [Row([0], TABLE, start=5, feed=1)], feeds_from_step_id=1),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
    ),
    "circular-tables": (
        lambda e: make_step(2, e, [Row(range(4), [21, 20], start=4), Row(range(4), [20, 21], start=4)]),
        grpc.StatusCode.INTERNAL,
        "CIRCULAR_BLOCK_TABLES",
    ),
}


@pytest.mark.parametrize(("build", "code", "reason"), REFUSED.values(), ids=REFUSED)
async def test_execute_refused_step_ends_the_stream_and_harms_nothing(build, code, reason):
    backend = HeldBackend().open()
    async with executing(backend) as (_, client, epoch):
        stream = client.execute()
        first = await stream.step(make_step(1, epoch, [Row(PROMPT, TABLE)]))
        slots = backend.slots.copy()
        bad = build(epoch)
        await stream.send(bad)
        await stream.send(decode(9, epoch, 5))
        error = await stream.error()
        info = error_info(error)
        assert (error.code(), info.reason) == (code, reason)
        assert info.metadata["step_id"] == str(bad.step_id)
        np.testing.assert_array_equal(backend.slots, slots)
        # A new stream starts its ids anew, and the content is still good. Its answer also shows that whatever lay in
        # the queue is gone.
        row = Row(values_of(first.sampled_token_ids), TABLE, start=5)
        second = await client.execute().step(make_step(1, epoch, [row]))
        assert values_of(second.sampled_token_ids) == oracle(PROMPT, 2)[1:]
        assert 9 not in backend.executed


async def test_execute_without_a_cache_is_failed_precondition():
    async with running_executor(sim_config()) as server, connected(server.address) as client:
        stream = client.execute()
        await stream.send(decode(4, 1, 0))
        error = await stream.error()
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (error_info(error).reason, error_info(error).metadata["step_id"]) == ("KV_NOT_INITIALIZED", "4")


async def test_execute_feed_on_a_new_streams_first_step_is_failed_precondition():
    async with executing(None) as (_, client, epoch):
        await client.execute().step(make_step(1, epoch, [Row(PROMPT, TABLE)]))
        stream = client.execute()
        await stream.send(make_step(2, epoch, [Row([0], TABLE, start=5, feed=0)], feeds_from_step_id=1))
        assert error_info(await stream.error()).reason == "FEED_NOT_KEPT"


@pytest.mark.parametrize(
    ("raised", "reason"), [(BackendError("BROKEN", "on purpose"), "BROKEN"), (ZeroDivisionError(), "INTERNAL_ERROR")]
)
async def test_execute_failed_step_keeps_queued_steps_from_running(raised, reason):
    async with executing(BrokenBackend()) as (server, client, epoch):
        backend = server.session._backend
        backend.step_errors[2] = raised
        stream = client.execute()
        for step in (1, 2, 3, 4):
            await stream.send(decode(step, epoch, step - 1))
        assert (await stream.receive()).step_id == 1
        error = await stream.error()
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INTERNAL, reason)
        assert error_info(error).metadata["step_id"] == "2"
        assert (await client.execute().step(decode(7, epoch, 0))).step_id == 7
        assert backend.executed == [1, 7]


class LogprobsOfNoSampleBackend(HeldBackend):
    """Its second step's result names a sample that the step does not have."""

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        if batch.step_id != 2:
            return result
        nobody = RowLogprobs(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32))
        return dataclasses.replace(result, logprobs={5: nobody})


async def test_execute_result_that_fits_no_response_ends_the_stream_and_names_the_step():
    async with executing(LogprobsOfNoSampleBackend().open()) as (_, client, epoch):
        stream = client.execute()
        for step in (1, 2, 3):  # the third may run before the second's result is found not to fit
            await stream.send(decode(step, epoch, step - 1))
        assert (await stream.receive()).step_id == 1
        error = await stream.error()
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INTERNAL, "INTERNAL_ERROR")
        assert error_info(error).metadata["step_id"] == "2"
        assert (await client.execute().step(decode(4, epoch, 0))).step_id == 4


async def test_execute_new_stream_supersedes_the_old():
    async with holding() as (backend, server, client, epoch):
        old = client.execute()
        for step in (1, 2, 3):
            await old.send(decode(step, epoch, step - 1))
        await step_started(backend)
        await until(lambda: server._thread._jobs.qsize() == 2)
        first = server._runner._current
        new = client.execute()
        await new.send(decode(1, epoch, 1))
        await until(lambda: server._runner._current is not first)
        backend.open()
        assert (await new.receive()).step_id == 1
        assert (await old.receive()).step_id == 1
        error = await old.error()
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED")
        await new.step(decode(2, epoch, 2))
        assert backend.executed == [1, 1, 2]


async def test_execute_superseded_stream_that_was_half_closed_does_not_look_complete():
    async with holding() as (backend, server, client, epoch):
        old = client.execute()
        for step in (1, 2):
            await old.send(decode(step, epoch, step - 1))
        await old.call.done_writing()
        await step_started(backend)
        await until(lambda: server._thread._jobs.qsize() == 2)
        first = server._runner._current
        new = client.execute()
        await new.send(decode(5, epoch, 0))
        await until(lambda: server._runner._current is not first)
        backend.open()
        assert (await old.receive()).step_id == 1
        assert error_info(await old.error()).reason == "STREAM_SUPERSEDED"
        assert (await new.receive()).step_id == 5
        assert backend.executed == [1, 5]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"\xff", "MALFORMED_MESSAGE"),
        (b"", "STALE_EPOCH"),
        (lambda epoch: decode(1, epoch + 1, 0), "STALE_EPOCH"),
        (lambda epoch: decode(0, epoch, 0), "INVALID_FIELD"),
        (lambda epoch: make_step(1, epoch, [Row([1], [10_000], start=0)]), "INVALID_FIELD"),
        (
            lambda epoch: make_step(2, epoch, [Row([-1], TABLE, start=1, feed=0)], feeds_from_step_id=1),
            "FEED_NOT_KEPT",
        ),
    ],
    ids=["bytes", "empty", "stale", "no_step_id", "no_such_block", "fed"],
)
async def test_execute_first_step_that_cannot_be_run_leaves_the_other_stream_alone(first, reason):
    async with executing(None) as (server, client, epoch):
        live = client.execute()
        await live.step(decode(1, epoch, 0))
        data = first if isinstance(first, bytes) else first(epoch).SerializeToString()
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream(f"/{SERVICE_NAME}/Execute")()
            await call.write(data)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert error_info(refused.value).reason == reason
        assert (await live.step(decode(2, epoch, 1))).step_id == 2


async def test_execute_stream_without_a_step_leaves_the_other_alone_and_ends_when_one_opened_after_it_takes_over():
    async with executing(None) as (server, client, epoch):
        live = client.execute()
        await live.step(decode(1, epoch, 0))
        silent = client.execute()
        await until(lambda: len(server._runner._open) == 2)
        await live.step(decode(2, epoch, 1))
        new = client.execute()
        assert (await new.step(decode(1, epoch, 2))).step_id == 1
        for ended in (live, silent):
            assert error_info(await ended.error()).reason == "STREAM_SUPERSEDED"
        await new.close()
        await until(lambda: not server._runner._open)


@pytest.mark.parametrize("said", ["the epoch", "another", "no number"])
async def test_execute_stream_whose_caller_knows_the_epoch_takes_over_at_once_and_no_other(said):
    """A manager fences off the one before it, before it relies on what the blocks hold."""
    async with executing(None) as (server, client, epoch):
        live = client.execute()
        await live.step(decode(1, epoch, 0))
        value = {"the epoch": str(epoch), "another": str(epoch + 1), "no number": "9" * 5000 + "x"}[said]
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream(f"/{SERVICE_NAME}/Execute")(metadata=(("kvplane-kv-epoch", value),))
            if said == "the epoch":
                assert error_info(await live.error()).reason == "STREAM_SUPERSEDED"
            else:
                await until(lambda: len(server._runner._open) == 2)
                assert (await live.step(decode(2, epoch, 1))).step_id == 2
            call.cancel()


async def test_execute_stream_without_a_step_ends_when_the_executor_stops():
    async with executing(None) as (server, client, epoch):
        live = client.execute()
        await live.step(decode(1, epoch, 0))
        silent = client.execute()
        await until(lambda: len(server._runner._open) == 2)
        server._runner.stop()
        for ended in (live, silent):
            assert error_info(await ended.error()).reason == "EXECUTOR_STOPPING"


async def test_execute_cancelled_stream_drops_its_queued_steps():
    async with holding() as (backend, server, client, epoch):
        stream = client.execute()
        for step in (1, 2, 3):
            await stream.send(decode(step, epoch, step - 1))
        await step_started(backend)
        await until(lambda: server._thread._jobs.qsize() == 2)
        current = server._runner._current
        stream.call.cancel()
        await until(lambda: current.closed)
        backend.open()
        assert (await client.execute().step(decode(8, epoch, 0))).step_id == 8
        assert backend.executed == [1, 8]


async def test_execute_half_closed_stream_answers_all_its_steps():
    async with holding() as (backend, _, client, epoch):
        stream = client.execute()
        for step in (1, 2, 3):
            await stream.send(decode(step, epoch, step - 1))
        await stream.call.done_writing()
        backend.open()
        assert [(await stream.receive()).step_id for _ in range(3)] == [1, 2, 3]
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_execute_reads_no_more_steps_than_have_a_place():
    async with holding() as (backend, server, client, epoch):
        stream = client.execute()
        sends = [asyncio.create_task(stream.send(decode(1, epoch, 0)))]
        await step_started(backend)
        for step in range(2, 10):
            await sends[-1]
            sends.append(asyncio.create_task(stream.send(decode(step, epoch, step - 1))))
        await until(lambda: server._thread._jobs.qsize() == MAX_QUEUED_STEPS - 1)
        for _ in range(20):
            await client.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert server._thread._jobs.qsize() == MAX_QUEUED_STEPS - 1
        backend.open()
        assert [(await stream.receive()).step_id for _ in range(9)] == list(range(1, 10))
        await asyncio.gather(*sends)


async def test_execute_epoch_is_checked_when_a_step_is_taken_up():
    """Step 2 is read while its epoch is current, and lies behind a reset."""
    async with holding() as (backend, server, client, epoch):
        stream = client.execute()
        await stream.send(decode(1, epoch, 0))
        await step_started(backend)
        reset = asyncio.ensure_future(client.stub.Reset(pb.ResetRequest(kv_epoch=epoch)))
        await until(lambda: server._thread._jobs.qsize() == 1)
        await stream.send(decode(2, epoch, 1))
        await until(lambda: server._thread._jobs.qsize() == 2)
        backend.open()
        new_epoch = (await reset).kv_cache.kv_epoch
        assert (await stream.receive()).step_id == 1
        info = error_info(await stream.error())
        assert (info.reason, info.metadata["step_id"]) == ("STALE_EPOCH", "2")
        assert info.metadata["expected"] == str(new_epoch)
        assert backend.executed == [1]


async def test_execute_reset_forgets_the_content():
    async with executing(None) as (_, client, epoch):
        stream = client.execute()
        await stream.step(make_step(1, epoch, [Row(PROMPT, TABLE)]))
        new_epoch = (await client.stub.Reset(pb.ResetRequest(kv_epoch=epoch))).kv_cache.kv_epoch
        row = Row(oracle(PROMPT, 1), TABLE, start=5)
        response = await stream.step(make_step(2, new_epoch, [row]))
        assert values_of(response.sampled_token_ids) != oracle(PROMPT, 2)[1:]


async def test_execute_row_failed_alone_fails_what_it_feeds_alone():
    async with executing(HeldBackend(vocab_size=4).open()) as (_, client, epoch):
        stream = client.execute()
        none_left = greedy(suppressed_token_ids=range(4))
        rows = [Row([1, 2, 3], [1], params=none_left), Row([2, 2, 2], [2])]
        first = await stream.step(make_step(1, epoch, rows, tags={1: b"one", 3: b"three"}))
        good = expected_tokens([2, 2, 2], 2, vocab_size=4)
        assert values_of(first.sampled_token_ids) == [-1, good[0]]
        assert [(error.row, error.reason) for error in first.row_errors] == [(0, "ALL_TOKENS_SUPPRESSED")]
        assert values_of(first.computed_upto) == [0, 3]
        assert await client.tags(epoch) == {3: b"three"}
        rows = [Row([0], [1], start=3, feed=0), Row([0], [2], start=3, feed=1)]
        step = make_step(2, epoch, rows, feeds_from_step_id=1, tags={1: b"bad", 2: b"good"})
        second = await stream.step(step)
        assert values_of(second.sampled_token_ids) == [-1, good[1]]
        assert [(error.row, error.reason) for error in second.row_errors] == [(0, "FED_BY_FAILED_ROW")]
        assert values_of(second.computed_upto) == [3, 4]
        assert await client.tags(epoch) == {3: b"three", 2: b"good"}


async def test_execute_fed_row_that_does_not_sample_is_reported_too():
    async with executing(HeldBackend(vocab_size=4).open()) as (_, client, epoch):
        stream = client.execute()
        none_left = greedy(suppressed_token_ids=range(4))
        await stream.step(make_step(1, epoch, [Row([1], [1], params=none_left)]))
        row = Row([1, 2, 0], [1], start=1, feed=0, samples=False)
        response = await stream.step(make_step(2, epoch, [row], feeds_from_step_id=1))
        assert [(error.row, error.reason) for error in response.row_errors] == [(0, "FED_BY_FAILED_ROW")]
        assert values_of(response.computed_upto) == [3]


async def test_execute_step_of_ten_megabytes_is_taken():
    async with executing(None) as (_, client, epoch):
        tags = {block: bytes(4096) for block in range(1, 64)}
        request = make_step(1, epoch, [], tags=tags)
        for _ in range(40):
            request.block_tags.MergeFrom(pb.BlockTags(tags=list(tags.values())))
        request.block_tags.block_ids.data *= 41
        assert request.ByteSize() > 10_000_000
        assert (await client.execute().step(request)).step_id == 1
        assert await client.tags(epoch) == tags


async def test_stop_answers_the_running_step_and_drops_the_queued():
    backend = HeldBackend()
    backend.load_gate.set()
    server = ExecutorServer(sim_config(), backend)
    await server.start()
    await server.load()
    async with connected(server.address) as client:
        epoch = await client.handshake()
        stream = client.execute()
        for step in (1, 2, 3):
            await stream.send(decode(step, epoch, step - 1))
        await step_started(backend)
        await until(lambda: server._thread._jobs.qsize() == 2)
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server._runner._stopping)
        backend.open()
        assert (await stream.receive()).step_id == 1
        error = await stream.error()
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_STOPPING")
        await stopping
    assert backend.executed == [1]
    assert backend.closed
