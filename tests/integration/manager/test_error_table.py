"""Each row of the design's error table that concerns the manager, over a real connection."""

from __future__ import annotations

import grpc
import pytest
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as kv_pb
from structlog.testing import capture_logs

from kvmanager_service.core.errors import (
    InvalidRequestError,
    PoolExhaustedError,
    PoolInUseError,
    QueueFullError,
    RowFailedError,
)
from kvmanager_service.core.request import FinishReason
from kvmanager_service.errors import UnavailableError
from tests.integration.manager.fake_engine import Manager, details
from tests.unit.manager.manager_builders import generate_request, model_view, text_model


async def failure(manager: Manager, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """Return what a Generate call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in manager.inference.Generate(request):
            pass
    assert manager.engine.open == {}
    return caught.value


async def test_bad_parameter_is_invalid_argument(manager: Manager) -> None:
    error = await failure(manager, generate_request(sampling=pb.SamplingParams(top_p=2)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    reason, metadata, _ = details(error)
    assert (reason, metadata["field"], metadata["got"]) == ("INVALID_PARAMETER", "sampling.top_p", "2.0")


async def test_empty_prompt_is_invalid_argument(manager: Manager) -> None:
    error = await failure(manager, pb.GenerateRequest(token_ids=pb.TokenIds()))
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_PROMPT")


async def test_prompt_longer_than_model_is_invalid_argument(manager: Manager) -> None:
    error = await failure(manager, generate_request(*[1] * 128))
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")


async def test_hopelessly_long_text_is_invalid_argument(manager: Manager) -> None:
    error = await failure(manager, pb.GenerateRequest(text="a" * 10_000_000))
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")


async def test_prompt_that_never_fits_the_pool_is_invalid_argument(manager: Manager) -> None:
    manager.engine.refuse = InvalidRequestError("SEQUENCE_TOO_LONG", "expected fewer tokens", num_blocks=3)
    error = await failure(manager, generate_request())
    assert (error.code(), details(error)[:2]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        ("SEQUENCE_TOO_LONG", {"num_blocks": "3"}),
    )


async def test_unknown_id_is_not_found(manager: Manager) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.inference.Abort(pb.AbortRequest(request_id="nobody"))
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")


async def test_id_in_use_is_already_exists_and_disturbs_nobody(manager: Manager) -> None:
    first = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.inference.Generate(generate_request(request_id="r")).read()
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
    manager.engine.step("r", 9, finish=FinishReason.LENGTH)
    assert [list(piece.token_ids) async for piece in first] == [[9]]
    assert manager.engine.aborted == []


async def test_executor_id_with_other_address_is_already_exists(manager: Manager) -> None:
    await manager.executors.Register(registry_pb.RegisterRequest(executor_id="e", address="host:1"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.executors.Register(registry_pb.RegisterRequest(executor_id="e", address="host:2"))
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.ALREADY_EXISTS, "EXECUTOR_ID_REUSED")


async def test_queue_full_is_resource_exhausted_with_retry_info(manager: Manager) -> None:
    manager.engine.refuse = QueueFullError("QUEUE_FULL", "expected fewer than 5 waiting, got 5", max_waiting=5)
    error = await failure(manager, generate_request())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error) == ("QUEUE_FULL", {"max_waiting": "5"}, 1_000)


async def test_queue_full_is_refused_before_the_prompt_is_read(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = manager.engine.model().text
    assert text is not None
    monkeypatch.setattr(text.tokenizer, "_encode_batch", lambda *_: pytest.fail("tokenised"))
    manager.engine.refuse = QueueFullError("QUEUE_FULL", "expected fewer than 5 waiting, got 5", max_waiting=5)
    error = await failure(manager, pb.GenerateRequest(text="a prompt " * 1000))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_lone_request_that_outgrew_pool_is_resource_exhausted_without_retry_info(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    manager.engine.step("r", 8)
    assert list((await call.read()).token_ids) == [8]
    manager.engine.step("r", finish=FinishReason.ERROR, error=PoolExhaustedError("POOL_EXHAUSTED", "outgrew"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(caught.value) == ("POOL_EXHAUSTED", {}, 0)


async def test_failed_row_is_internal(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    manager.engine.step("r", finish=FinishReason.ERROR, error=RowFailedError("NON_FINITE_LOGITS", "row failed"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS")


async def test_chat_without_template_is_failed_precondition(manager: Manager) -> None:
    manager.engine.model_view = model_view(text_model(chat=False))
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    error = await failure(manager, pb.GenerateRequest(chat=chat))
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")


async def test_text_without_tokenizer_is_failed_precondition(manager: Manager) -> None:
    manager.engine.model_view = model_view(None)
    error = await failure(manager, pb.GenerateRequest(text="hi"))
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_TOKENIZER")


async def test_reset_while_blocks_are_held_is_failed_precondition(manager: Manager) -> None:
    manager.engine.refuse = PoolInUseError("POOL_IN_USE", "expected no request, got 2")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.ResetPrefixCache(kv_pb.ResetPrefixCacheRequest())
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.FAILED_PRECONDITION, "POOL_IN_USE")


async def test_executor_of_other_model_is_failed_precondition(manager: Manager) -> None:
    register = registry_pb.RegisterRequest(executor_id="e", address="host:1")
    await manager.executors.Register(register)
    manager.registry.reject("e", "MODEL_MISMATCH", "expected model a, got b")
    with pytest.raises(grpc.aio.AioRpcError, match="expected model a, got b") as caught:
        await manager.executors.Register(register)
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_MISMATCH")


async def test_no_executor_is_unavailable(manager: Manager) -> None:
    manager.engine.model_view = None
    error = await failure(manager, generate_request())
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.inference.GetModel(pb.GetModelRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.ListBlocks(kv_pb.ListBlocksRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_draining_is_unavailable(manager: Manager) -> None:
    manager.engine.refuse = UnavailableError("DRAINING", "expected a serving manager, got one that is stopping")
    error = await failure(manager, generate_request())
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_new_executor_while_draining_is_unavailable(manager: Manager) -> None:
    manager.registry.drain()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.executors.Register(registry_pb.RegisterRequest(executor_id="e", address="host:1"))
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_fault_of_ours_is_internal_and_tells_nothing_of_the_prompt(manager: Manager) -> None:
    manager.engine.refuse = KeyError("secret prompt")
    with capture_logs() as logs:
        error = await failure(manager, generate_request())
    assert (error.code(), details(error)[0]) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in (error.details() or "")
    (entry,) = [log for log in logs if log["event"] == "unexpected_error"]
    assert "in check_open" in entry["stack"]
    assert "secret" not in entry["stack"]
