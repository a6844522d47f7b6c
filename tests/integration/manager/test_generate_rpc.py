"""Generate over a real connection: output, cancellation, deadlines, resumption."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.admission import Admission
from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.request import FinishReason
from kvmanager_service.pacer import FREE_STREAMS
from kvmanager_service.servicers.inference import CONTRACT_VERSION
from tests.integration.manager.fake_engine import Manager, details, until
from tests.unit.manager.manager_builders import byte_level_tokenizer, generate_request, int32s


def ids_of(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text, add_special_tokens=False).ids


async def test_generate_text_in_text_out(manager: Manager) -> None:
    call = manager.inference.Generate(pb.GenerateRequest(request_id="r", text="the quick"))
    await manager.engine.submitted("r")
    assert int32s(manager.engine.open["r"][0].prompt) == [0, *ids_of("the quick")]
    for token_id in ids_of(" brown größe"):
        manager.engine.step("r", token_id)
    manager.engine.step("r", 0, finish=FinishReason.STOP, stop_token_id=0)
    pieces = [piece async for piece in call]
    assert "".join(piece.text for piece in pieces) == " brown größe"
    assert [token_id for piece in pieces for token_id in piece.token_ids] == [*ids_of(" brown größe"), 0]
    assert (pieces[-1].finish_reason, pieces[-1].stop_token_id) == (common_pb2.FINISH_REASON_STOP, 0)
    assert pieces[-1].usage.prompt_tokens == 1 + len(ids_of("the quick"))


async def test_generate_chat_is_templated(manager: Manager) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    call = manager.inference.Generate(pb.GenerateRequest(request_id="r", chat=chat))
    await manager.engine.submitted("r")
    expected = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert int32s(manager.engine.open["r"][0].prompt) == expected
    call.cancel()


async def test_generate_without_id_gets_one_of_its_own(manager: Manager) -> None:
    calls = [manager.inference.Generate(generate_request()) for _ in range(2)]
    await until(lambda: len(manager.engine.open) == 2)
    for request_id in list(manager.engine.open):
        manager.engine.step(request_id, 5, finish=FinishReason.LENGTH)
    assert len({(await call.read()).request_id for call in calls}) == 2


async def test_generate_without_seed_draws_one_for_each_request(manager: Manager) -> None:
    calls = [manager.inference.Generate(generate_request(request_id=name)) for name in ("a", "b")]
    await manager.engine.submitted("a", "b")
    seeds = {manager.engine.open[name][0].seed for name in ("a", "b")}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**64 for seed in seeds)
    for call in calls:
        call.cancel()


async def test_generate_cancelled_is_aborted_at_once(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    manager.engine.step("r", 5)
    await call.read()
    call.cancel()
    await until(lambda: manager.engine.aborted == ["r"])


async def test_generate_cancelled_while_the_reader_is_stuck_is_aborted(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    # More than the flow-control windows take, so that the server's write waits.
    for _ in range(40):
        manager.engine.step("r", *[500] * 100_000)
        await asyncio.sleep(0.001)
    call.cancel()
    await until(lambda: manager.engine.aborted == ["r"])


async def test_generate_deadline_passed_is_aborted(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: manager.engine.aborted == ["r"])


async def test_generate_connection_lost_is_aborted(manager: Manager) -> None:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{manager.server.port}")
    call = type(manager.inference)(channel).Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    await channel.close()
    await until(lambda: manager.engine.aborted == ["r"])
    assert call.done()


async def test_generate_many_calls_rest_between_messages_and_lose_nothing(manager: Manager) -> None:
    names = [f"r{index}" for index in range(FREE_STREAMS + 8)]
    calls = [manager.inference.Generate(generate_request(request_id=name)) for name in names]
    await manager.engine.submitted(*names)
    for token_id in range(1, 30):
        for name in names:
            manager.engine.step(name, token_id, finish=FinishReason.LENGTH if token_id == 29 else None)
        await asyncio.sleep(0)
    for call in calls:
        assert [token_id async for piece in call for token_id in piece.token_ids] == list(range(1, 30))


async def test_generate_finished_is_not_aborted(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    manager.engine.step("r", 5, finish=FinishReason.LENGTH)
    assert len([piece async for piece in call]) == 1
    await manager.inference.GetModel(pb.GetModelRequest())
    assert manager.engine.aborted == []


async def test_generate_stop_string_ends_stream_and_request(manager: Manager) -> None:
    request = pb.GenerateRequest(request_id="r", text="x", stopping=pb.StoppingParams(stop=[" fox"]))
    call = manager.inference.Generate(request)
    await manager.engine.submitted("r")
    for token_id in ids_of("the quick fox jumps"):
        if "r" in manager.engine.open:
            manager.engine.step("r", token_id)
    pieces = [piece async for piece in call]
    assert "".join(piece.text for piece in pieces) == "the quick"
    assert (pieces[-1].stop_string, manager.engine.aborted) == (" fox", [])


async def test_generate_resumed_goes_on_where_it_broke_off(manager: Manager) -> None:
    ids = ids_of("größe 🎉 fin, the end")
    for at in range(1, len(ids)):
        request = pb.GenerateRequest(request_id="r", text="x", stopping=pb.StoppingParams(stop=["fini"]))
        broken = manager.inference.Generate(request)
        await manager.engine.submitted("r")
        for token_id in ids[:at]:
            manager.engine.step("r", token_id)
        before = (await broken.read()).text
        broken.cancel()
        await until(lambda: "r" not in manager.engine.open)
        request.resume_token_ids.ids.extend(ids[:at])
        resumed = manager.inference.Generate(request)
        await manager.engine.submitted("r")
        assert int32s(manager.engine.open["r"][0].resumed) == ids[:at]
        for token_id in ids[at:]:
            manager.engine.step("r", token_id)
        manager.engine.step("r", finish=FinishReason.LENGTH)
        pieces = [piece async for piece in resumed]
        assert before + "".join(piece.text for piece in pieces) == "größe 🎉 fin, the end"
        assert [token_id for piece in pieces for token_id in piece.token_ids] == ids[at:]
        assert pieces[-1].usage.completion_tokens == len(ids)


async def test_generate_resume_tokens_with_a_stop_string_are_refused(manager: Manager) -> None:
    request = pb.GenerateRequest(
        text="x", stopping=pb.StoppingParams(stop=["fox"]), resume_token_ids=pb.TokenIds(ids=ids_of("the fox is"))
    )
    with pytest.raises(grpc.aio.AioRpcError, match="earlier stream was complete") as caught:
        await manager.inference.Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


OUTPUTS = ("größe 🎉 fin, the end", " the dog fini", "漢字 and the fox")
"""Three outputs; the second ends by the stop string ``fini``, the others by their length."""


async def test_generate_several_outputs_resumed_go_on_where_each_broke_off(manager: Manager) -> None:
    names = ("r", "r#1", "r#2")
    ids = [ids_of(text) for text in OUTPUTS]
    # In turns: before, after and between the beginnings and the end of the second.
    turns = [(place, at) for at in range(max(map(len, ids))) for place in range(3) if at < len(ids[place])]
    for broken_after in range(len(turns)):
        texts, tokens, ends = ["", "", ""], [list[int]() for _ in ids], ["", "", ""]

        async def read(call: Any, texts: list[str] = texts, tokens: Any = tokens, ends: list[str] = ends) -> None:
            async for piece in call:
                texts[piece.index] += piece.text
                tokens[piece.index] += piece.token_ids
                if piece.finish_reason:
                    assert not ends[piece.index], "an output ends once"
                    ends[piece.index] = common_pb2.FinishReason.Name(piece.finish_reason) + piece.stop_string
                    assert piece.usage.completion_tokens == len(tokens[piece.index])

        def compute(some: list[tuple[int, int]]) -> None:
            for place, at in some:
                is_last = at + 1 == len(ids[place])
                if names[place] in manager.engine.open:
                    finish = FinishReason.LENGTH if is_last and place != 1 else None
                    manager.engine.step(names[place], ids[place][at], finish=finish)

        request = pb.GenerateRequest(request_id="r", text="x", n=3, stopping=pb.StoppingParams(stop=["fini"]))
        broken = manager.inference.Generate(request)
        reader = asyncio.create_task(read(broken))
        await manager.engine.submitted(*names)
        compute(turns[:broken_after])
        await until(lambda tokens=tokens, count=broken_after: sum(map(len, tokens)) == count)  # type: ignore[misc]
        broken.cancel()
        await asyncio.wait((reader,))
        await until(lambda: not manager.engine.open)
        for place in range(3):
            request.resume_outputs.add(token_ids=tokens[place], is_finished=bool(ends[place]))
        resumed = manager.inference.Generate(request)
        await manager.engine.submitted(*[name for name, end in zip(names, ends, strict=True) if not end])
        assert len(manager.engine.open) == ends.count("")
        compute(turns[broken_after:])
        await read(resumed)
        assert texts == [OUTPUTS[0], " the dog ", OUTPUTS[2]]
        assert tokens == ids
        assert ends == ["FINISH_REASON_LENGTH", "FINISH_REASON_STOPfini", "FINISH_REASON_LENGTH"]


async def test_generate_resumed_output_with_a_stop_string_is_refused(manager: Manager) -> None:
    outputs = [pb.ResumedOutput(token_ids=ids_of("the")), pb.ResumedOutput(token_ids=ids_of("the fox is"))]
    request = pb.GenerateRequest(text="x", n=2, stopping=pb.StoppingParams(stop=["fox"]), resume_outputs=outputs)
    with pytest.raises(grpc.aio.AioRpcError, match=r"a stop string in their text; .* is_finished") as caught:
        await manager.inference.Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)[:2] == (
        "INVALID_PARAMETER",
        {
            "field": "resume_outputs[1].token_ids",
            "expected": "tokens of an unfinished output",
            "got": "a stop string in their text",
        },
    )
    request.resume_outputs[1].is_finished = True  # then nobody looks at them
    call = manager.inference.Generate(request)
    await until(lambda: bool(manager.engine.open))
    call.cancel()


async def test_generate_resumed_outputs_that_are_many_are_read_beside_the_loop(manager: Manager) -> None:
    """Together they are too many for it, none is alone."""
    outputs = [pb.ResumedOutput(token_ids=[5] * 100) for _ in range(30)]
    request = pb.GenerateRequest(request_id="r", text="x", n=30, resume_outputs=outputs)
    assert Admission.takes_long(request)
    assert not Admission.takes_long(pb.GenerateRequest(text="x", n=2**31 - 1))
    call = manager.inference.Generate(request)
    await manager.engine.submitted("r", "r#29")
    for name in list(manager.engine.open):
        manager.engine.step(name, 6, finish=FinishReason.LENGTH)
    pieces = [piece async for piece in call]
    assert [piece.index for piece in pieces] == list(range(30))
    assert {piece.usage.completion_tokens for piece in pieces} == {101}


async def test_generate_resumed_call_whose_first_output_had_finished_is_aborted_by_its_own_id(
    manager: Manager,
) -> None:
    outputs = [pb.ResumedOutput(is_finished=True), pb.ResumedOutput(token_ids=[5])]
    call = manager.inference.Generate(pb.GenerateRequest(request_id="r", text="x", n=2, resume_outputs=outputs))
    await manager.engine.submitted("r#1")
    call.cancel()
    await until(lambda: not manager.engine.open)
    assert manager.engine.aborted == ["r"]


async def test_abort_gives_the_stream_a_last_message(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    await manager.inference.Abort(pb.AbortRequest(request_id="r"))
    (last,) = [piece async for piece in call]
    assert (last.finish_reason, last.HasField("usage")) == (common_pb2.FINISH_REASON_ABORT, True)
    assert manager.engine.aborted == ["r"]


async def test_get_contract_needs_no_executor(manager: Manager) -> None:
    manager.engine.model_view = None
    with pytest.raises(grpc.aio.AioRpcError):
        await manager.inference.GetModel(pb.GetModelRequest())
    answer = await manager.inference.GetContract(pb.GetContractRequest())
    assert answer.contract_version == CONTRACT_VERSION >= 1


async def test_get_model_describes_the_model(manager: Manager) -> None:
    model = await manager.inference.GetModel(pb.GetModelRequest())
    assert (model.name, model.max_model_len, model.vocab_size, list(model.eos_token_ids)) == ("tiny", 128, 610, [0])
    assert (model.max_logprobs, model.has_chat_template, model.has_tokenizer) == (5, True, True)
    assert model.dtype == "float32"


async def test_generate_several_outputs_each_with_its_text_and_its_end(manager: Manager) -> None:
    call = manager.inference.Generate(pb.GenerateRequest(request_id="r", text="the", n=3, stopping={"stop": ["dog"]}))
    await manager.engine.submitted("r", "r#1", "r#2")
    texts = (" brown", " größe", " dog")
    for index, text in enumerate(texts):
        for token_id in ids_of(text):
            name = f"r#{index}" if index else "r"
            if name in manager.engine.open:
                manager.engine.step(name, token_id)
    manager.engine.step("r", 0, finish=FinishReason.STOP, stop_token_id=0)
    manager.engine.step("r#1", 7, finish=FinishReason.LENGTH)
    pieces = [piece async for piece in call]
    assert {piece.request_id for piece in pieces} == {"r"}
    by_index = {index: [piece for piece in pieces if piece.index == index] for index in range(3)}
    assert "".join(piece.text for piece in by_index[0]) == " brown"
    assert "".join(piece.text for piece in by_index[1]).startswith(" größe")
    assert "".join(piece.text for piece in by_index[2]) == " "
    assert [by_index[index][-1].finish_reason for index in range(3)] == [
        common_pb2.FINISH_REASON_STOP,
        common_pb2.FINISH_REASON_LENGTH,
        common_pb2.FINISH_REASON_STOP,
    ]
    assert by_index[2][-1].stop_string == "dog"
    assert {by_index[index][-1].usage.prompt_tokens for index in range(3)} == {1 + len(ids_of("the"))}
    assert by_index[1][-1].usage.completion_tokens == len(ids_of(" größe")) + 1


async def test_generate_error_of_one_output_ends_the_call_and_the_others(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r", n=2))
    await manager.engine.submitted("r", "r#1")
    manager.engine.step("r", 5)
    error = RowFailedError("NON_FINITE_LOGITS", "as the test wants")
    manager.engine.step("r#1", finish=FinishReason.ERROR, error=error)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [piece async for piece in call]
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    await until(lambda: manager.engine.aborted == ["r"])


async def test_generate_several_outputs_cancelled_are_aborted(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r", n=2))
    await manager.engine.submitted("r", "r#1")
    manager.engine.step("r#1", 5, finish=FinishReason.LENGTH)
    await call.read()
    call.cancel()
    await until(lambda: manager.engine.aborted == ["r"])
