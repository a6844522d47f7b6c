"""From prompts and options to messages, and from errors of the wire to errors of the client."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane_client import ChatMessage, InternalError, InvalidArgumentError, KvPlaneError, UnavailableError
from kvplane_client._convert import stats_from
from kvplane_client._request_builder import build_request
from kvplane_client.errors import error_from_rpc, error_from_wire


class Index:
    """An integer that is not an int, as numpy's are."""

    def __index__(self) -> int:
        return 7


def test_prompts_of_each_kind_fill_their_field() -> None:
    assert build_request("hi", {}).text == "hi"
    assert list(build_request((1, Index()), {}).token_ids.ids) == [1, 7]  # type: ignore[arg-type]
    chat = build_request([ChatMessage("system", "s"), {"role": "user", "content": "u"}], {}).chat  # type: ignore[list-item]
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "s"), ("user", "u")]


def test_ids_are_chosen_and_differ() -> None:
    assert build_request("a", {}).request_id != build_request("a", {}).request_id


def test_absent_options_stay_absent_and_zero_is_sent() -> None:
    plain = build_request("a", {"temperature": None})
    assert [name.name for name, _ in plain.sampling.ListFields()] == ["seed"]
    assert plain.stopping.ListFields() == []
    assert build_request("a", {"temperature": 0.0, "top_k": 0}).sampling == pb.SamplingParams(temperature=0, top_k=0)


def test_one_stop_string_needs_no_list() -> None:
    assert list(build_request("a", {"stop": "###"}).stopping.stop) == ["###"]


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        ([], {}, "prompt"),
        (5, {}, "prompt"),
        ([True], {}, "prompt"),
        ([1, False], {}, "prompt"),
        ("a", {"stop_token_ids": [True]}, "stop_token_ids"),
        (b"bytes", {}, "prompt"),
        ({"role": "user", "content": "x"}, {}, "prompt"),
        ([1, "two"], {}, "prompt"),
        ([2**31], {}, "prompt"),
        ([{"role": "user"}], {}, "prompt"),
        ([ChatMessage("user", "x"), 3], {}, "prompt"),
        ("\ud800", {}, "prompt"),
        ("a", {"temperature": "hot"}, "temperature"),
        ("a", {"top_k": 2**40}, "top_k"),
        ("a", {"seed": -1}, "seed"),
        ("a", {"max_tokens": 1.5}, "max_tokens"),
        ("a", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("a", {"stop": [1]}, "stop"),
        ("a", {"stop_token_ids": ["x"]}, "stop_token_ids"),
        ("a", {"request_id": 5}, "request_id"),
        ("a", {"cache_salt": 5}, "cache_salt"),
    ],
)
def test_value_that_cannot_be_sent_is_refused_by_name(prompt: Any, options: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}: expected"):
        build_request(prompt, options)


def test_value_out_of_the_wires_range_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidArgumentError, match=r"seed: expected a value that a request can carry \(.*\), got -1"):
        build_request("a", {"seed": -1})


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_request("a", {"temprature": 1})  # type: ignore[typeddict-unknown-key]


def rpc_error(code: grpc.StatusCode, message: str, trailer: bytes | None) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata() if trailer is None else grpc.aio.Metadata(("grpc-status-details-bin", trailer))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, message)


def test_error_info_of_another_domain_is_not_ours() -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="PROXY", domain="example.com"))
    trailer = status_pb2.Status(code=14, message="down", details=[packed]).SerializeToString()

    error = error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, "down", trailer))

    assert (type(error), error.reason, str(error)) == (UnavailableError, "", "down")


@pytest.mark.parametrize("trailer", [None, b"\xff\xff\xff"])
def test_error_without_readable_details_keeps_code_and_message(trailer: bytes | None) -> None:
    error = error_from_rpc(rpc_error(grpc.StatusCode.INTERNAL, "boom", trailer))

    assert (type(error), error.code, error.message, error.metadata) == (
        InternalError, grpc.StatusCode.INTERNAL, "boom", {},
    )  # fmt: skip


def test_error_detail_that_cannot_be_parsed_is_passed_over() -> None:
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    trailer = status_pb2.Status(code=13, details=[broken]).SerializeToString()

    assert error_from_rpc(rpc_error(grpc.StatusCode.INTERNAL, "boom", trailer)).reason == ""


def test_wire_error_of_an_unknown_code_is_the_base_class() -> None:
    error = error_from_wire(common_pb2.Error(code=99, message="new", reason="NEW"))

    assert (type(error), error.code, error.retry_delay) == (KvPlaneError, grpc.StatusCode.UNKNOWN, None)


def test_enum_value_of_a_newer_server_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="newer client"):
        stats_from(manager_pb.GetStatsResponse(state=77))  # type: ignore[arg-type]
