"""GenerateMany over a real connection."""

from __future__ import annotations

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.request import FinishReason
from tests.integration.manager.fake_engine import Manager, until
from tests.unit.manager.manager_builders import CORPUS, generate_request, model_view, text_model


def start(*names: str) -> list[pb.GenerateManyRequest]:
    return [pb.GenerateManyRequest(generate=generate_request(request_id=name)) for name in names]


async def test_generate_many_one_message_a_step(manager: Manager) -> None:
    call = manager.inference.GenerateMany()
    names = [f"r{index}" for index in range(20)]
    for order in start(*names):
        await call.write(order)
    await manager.engine.submitted(*names)
    for step in range(3):
        for name in names:
            manager.engine.step(name, step + 5)
        message = await call.read()
        assert [entry.request_id for entry in message.outputs] == names
        assert {tuple(entry.token_ids) for entry in message.outputs} == {(step + 5,)}
        assert [entry.HasField("usage") for entry in message.outputs] == [step == 0] * 20
    call.cancel()
    await until(lambda: sorted(manager.engine.aborted) == sorted(names))


async def test_generate_many_half_closed_ends_after_the_last_request(manager: Manager) -> None:
    call = manager.inference.GenerateMany()
    for order in start("a", "b"):
        await call.write(order)
    await call.done_writing()
    await manager.engine.submitted("a", "b")
    manager.engine.step("a", 5, finish=FinishReason.LENGTH)
    assert [entry.request_id for entry in (await call.read()).outputs] == ["a"]
    manager.engine.step("b", 6, finish=FinishReason.LENGTH)
    assert [entry.request_id for entry in (await call.read()).outputs] == ["b"]
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert manager.engine.aborted == []


async def test_generate_many_bad_request_disturbs_no_other(manager: Manager) -> None:
    call = manager.inference.GenerateMany()
    bad = generate_request(request_id="bad", sampling=pb.SamplingParams(top_k=-1))
    for order in (*start("good"), pb.GenerateManyRequest(generate=bad)):
        await call.write(order)
    message = await call.read()
    (error,) = message.errors
    assert (error.request_id, error.error.code, error.error.reason) == ("bad", 3, "INVALID_PARAMETER")
    assert error.error.metadata["field"] == "sampling.top_k"
    await manager.engine.submitted("good")
    manager.engine.step("good", 5, finish=FinishReason.LENGTH)
    assert [entry.request_id for entry in (await call.read()).outputs] == ["good"]
    call.cancel()


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (pb.GenerateManyRequest(), "order"),
        (pb.GenerateManyRequest(generate=generate_request()), "generate.request_id"),
    ],
)
async def test_generate_many_malformed_order_is_an_error_without_id(
    manager: Manager, order: pb.GenerateManyRequest, field: str
) -> None:
    call = manager.inference.GenerateMany()
    await call.write(order)
    (error,) = (await call.read()).errors
    assert (error.request_id, error.error.metadata["field"]) == ("", field)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_generate_many_duplicate_id_is_an_error_and_first_goes_on(manager: Manager) -> None:
    call = manager.inference.GenerateMany()
    for order in start("r", "r"):
        await call.write(order)
    (error,) = (await call.read()).errors
    assert (error.request_id, error.error.code) == ("r", 6)
    manager.engine.step("r", 5, finish=FinishReason.LENGTH)
    assert [list(entry.token_ids) for entry in (await call.read()).outputs] == [[5]]
    call.cancel()


async def test_generate_many_abort_ends_its_own_requests_only(manager: Manager) -> None:
    other = manager.inference.Generate(generate_request(request_id="other"))
    await manager.engine.submitted("other")
    call = manager.inference.GenerateMany()
    aborts = [pb.GenerateManyRequest(abort_request_id=name) for name in ("other", "nobody", "mine")]
    for order in (*start("mine"), *aborts):
        await call.write(order)
    (entry,) = (await call.read()).outputs
    assert (entry.request_id, entry.finish_reason) == ("mine", common_pb2.FINISH_REASON_ABORT)
    assert manager.engine.aborted == ["mine"]
    call.cancel()
    other.cancel()


async def test_generate_many_abort_right_behind_a_long_text_is_heeded(manager: Manager) -> None:
    manager.engine.model_view = model_view(text_model(), max_model_len=1_000_000)
    call = manager.inference.GenerateMany()
    text = "\n".join(CORPUS) * 50
    await call.write(pb.GenerateManyRequest(generate=pb.GenerateRequest(request_id="long", text=text)))
    await call.write(pb.GenerateManyRequest(abort_request_id="long"))
    (entry,) = (await call.read()).outputs
    assert (entry.request_id, entry.finish_reason) == ("long", common_pb2.FINISH_REASON_ABORT)
    assert manager.engine.aborted == ["long"]
    call.cancel()


async def test_generate_many_short_request_does_not_wait_for_a_long_text(manager: Manager) -> None:
    manager.engine.model_view = model_view(text_model(), max_model_len=10_000_000)
    call = manager.inference.GenerateMany()
    text = "\n".join(CORPUS) * 2_000
    await call.write(pb.GenerateManyRequest(generate=pb.GenerateRequest(request_id="long", text=text)))
    for order in start("short"):
        await call.write(order)
    await manager.engine.submitted("short")
    assert "long" not in manager.engine.open
    await manager.engine.submitted("long")
    call.cancel()


async def test_generate_many_half_close_waits_for_a_long_text(manager: Manager) -> None:
    manager.engine.model_view = model_view(text_model(), max_model_len=1_000_000)
    call = manager.inference.GenerateMany()
    text = "\n".join(CORPUS) * 50
    await call.write(pb.GenerateManyRequest(generate=pb.GenerateRequest(request_id="long", text=text)))
    await call.done_writing()
    await manager.engine.submitted("long")
    manager.engine.step("long", 5, finish=FinishReason.LENGTH)
    assert [list(entry.token_ids) for entry in (await call.read()).outputs] == [[5]]
    assert await call.read() is grpc.aio.EOF


async def test_generate_many_outputs_of_one_request_come_in_one_message_a_step(manager: Manager) -> None:
    call = manager.inference.GenerateMany()
    await call.write(pb.GenerateManyRequest(generate=generate_request(request_id="r", n=3)))
    await call.done_writing()
    names = ["r", "r#1", "r#2"]
    await manager.engine.submitted(*names)
    for step in range(2):
        for index, name in enumerate(names):
            manager.engine.step(name, 10 * step + index, finish=FinishReason.LENGTH if step else None)
        message = await call.read()
        assert [(entry.request_id, entry.index) for entry in message.outputs] == [("r", 0), ("r", 1), ("r", 2)]
        assert [list(entry.token_ids) for entry in message.outputs] == [[10 * step + index] for index in range(3)]
    assert await call.read() is grpc.aio.EOF


async def test_generate_many_error_of_one_output_is_the_requests_and_ends_the_others(manager: Manager) -> None:
    call = manager.inference.GenerateMany()
    await call.write(pb.GenerateManyRequest(generate=generate_request(request_id="r", n=3)))
    for order in start("other"):
        await call.write(order)
    await manager.engine.submitted("r", "r#1", "r#2", "other")
    error = RowFailedError("NON_FINITE_LOGITS", "as the test wants")
    manager.engine.step("r#1", finish=FinishReason.ERROR, error=error)
    manager.engine.step("r#2", finish=FinishReason.ERROR, error=error)  # in the same step: it is told once
    message = await call.read()
    assert [(entry.request_id, entry.error.reason) for entry in message.errors] == [("r", "NON_FINITE_LOGITS")]
    await until(lambda: manager.engine.aborted == ["r"])
    manager.engine.step("other", 5, finish=FinishReason.LENGTH)
    message = await call.read()
    assert ([entry.request_id for entry in message.outputs], list(message.errors)) == (["other"], [])
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
