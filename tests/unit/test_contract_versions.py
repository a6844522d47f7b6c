"""What must not be ignored is marked in the contract, and both sides go by the marks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pool_pb
from kvplane_client._contract import marked_fields

from kvmanager_service.servicers.inference import CONTRACT_VERSION

SAYS_WHO_SHARES = {"tenant", "cache_salt", "adapter", "lora_id", "lora_revision"}
"""Names of fields that decide who shares K/V with whom. TokenSpans have SequencePoolInfo.max_spans."""

AS_OLD_AS_THEIR_MESSAGE = {
    "GenerateRequest.cache_salt",
    "PinPrefixRequest.cache_salt",
    "PinPrefixRequest.tenant",
    "OpenSequence.cache_salt",
    "OpenSequence.lora_id",
    "OpenSequence.lora_revision",
}
"""Whoever knows the message knows these. A field that is added to a message is never one of them."""


def messages_of_requests() -> Iterator[Descriptor]:
    """All messages that a client of the manager may send, those in others included."""
    left = [
        method.input_type
        for module in (pb, manager_pb, registry_pb)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    seen: set[str] = set()
    while left:
        message = left.pop()
        if message.full_name not in seen:
            seen.add(message.full_name)
            left += [field.message_type for field in message.fields if field.message_type is not None]
            yield message


def known_since(field: FieldDescriptor) -> int:
    return field.GetOptions().Extensions[common_pb2.known_since]


def fields() -> dict[str, FieldDescriptor]:
    return {f"{message.name}.{field.name}": field for message in messages_of_requests() for field in message.fields}


def test_the_managers_version_is_the_highest_mark() -> None:
    assert max(map(known_since, fields().values())) == CONTRACT_VERSION


def test_every_field_that_says_who_shares_is_marked_or_as_old_as_its_message() -> None:
    found = {path for path, field in fields().items() if field.name in SAYS_WHO_SHARES}
    unmarked = {path for path in found if not known_since(fields()[path])}
    assert unmarked == AS_OLD_AS_THEIR_MESSAGE
    assert {"GenerateRequest.tenant", "GenerateRequest.adapter", "OpenSequence.tenant"} <= found - unmarked


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.GenerateRequest(text="x", cache_salt="s", sampling=pb.SamplingParams(logit_bias={1: 2.0})), {}),
        (pb.GenerateRequest(tenant="t", n=2), {"tenant": 1, "n": 1}),
        (pb.GenerateManyRequest(generate=pb.GenerateRequest(adapter="a")), {"generate.adapter": 1}),
        (
            pool_pb.UpdateSequencesRequest(
                operations=[
                    pool_pb.SequenceOperation(close=pool_pb.CloseSequence(sequence_id="a")),
                    pool_pb.SequenceOperation(open=pool_pb.OpenSequence(sequence_id="a", tenant="t")),
                ]
            ),
            {"operations.open.tenant": 1},
        ),
    ],
)
def test_marked_fields_are_found_wherever_they_are(message: pb.GenerateRequest, expected: dict[str, int]) -> None:
    assert dict(marked_fields(message)) == expected
