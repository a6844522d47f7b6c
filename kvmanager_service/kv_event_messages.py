"""The cache's events as messages of WatchKvEvents.

Station: called by the servicer, for the keys of traced blocks, too; calls nobody. Knows what an event looks like on
the wire, not when one comes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from kvplane.common.v1.common_pb2 import Int32Array
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as pb

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_events import BlockEvent
from kvmanager_service.core.block_hash import KeyDomain, decode_extra_keys
from kvmanager_service.core.errors import EventsForgottenError, InvalidRequestError
from kvmanager_service.core.group_hits import parent_hash_of
from kvmanager_service.core.group_key import group_of
from kvmanager_service.engine_api import Engine

__all__ = ["MAX_EVENTS", "event_batch", "fill_keys", "snapshot_batches", "watch"]

_KEY_FIELDS: dict[int, str] = {
    KeyDomain.CACHE_SALT: "cache_salt",
    KeyDomain.TENANT: "tenant",
    KeyDomain.LORA_ID: "lora_id",
    KeyDomain.LORA_REVISION: "lora_revision",
}

MAX_EVENTS = 1_000
"""Events in one message: a few milliseconds of the loop that all streams share."""


async def watch(engine: Engine, request: pb.WatchKvEventsRequest) -> AsyncIterator[pb.WatchKvEventsResponse]:
    """The messages of one stream; it ends with an error only.

    Raises:
        InvalidRequestError: a sequence number without its log, or a log without one.
        EventsForgottenError: the events asked for are of another log, or not kept any more.
        UnavailableError: the manager stops.
    """
    events = engine.kv_events()
    if bool(request.log_id) != bool(request.from_sequence):
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            "log_id: expected to be set where from_sequence is and nowhere else, got one of them; take both from the"
            " same WatchKvEventsResponse, or neither for a snapshot",
            field="log_id",
        )
    with_tokens, with_keys = request.include_token_ids, request.include_keys
    if not request.from_sequence:
        sequence = events.log.next_sequence
        stored = engine.kv_snapshot()
        for message in snapshot_batches(stored, sequence, with_tokens=with_tokens, with_keys=with_keys):
            message.log_id = events.log_id
            yield message
    elif request.log_id != events.log_id:
        raise EventsForgottenError(
            "EVENTS_FORGOTTEN",
            f"expected log_id {events.log_id!r}, got that of another run of the manager; start with a snapshot",
            log_id=events.log_id,
        )
    else:
        sequence = request.from_sequence
    while True:
        batch = await events.next(sequence, MAX_EVENTS)
        message = event_batch(batch, sequence, with_tokens=with_tokens, with_keys=with_keys)
        message.log_id = events.log_id
        sequence = message.next_sequence
        yield message


def event_batch(
    events: Sequence[BlockEvent], sequence: int, *, with_tokens: bool, with_keys: bool = False
) -> pb.WatchKvEventsResponse:
    """Events in order, the first of which has this number."""
    message = pb.WatchKvEventsResponse(next_sequence=sequence + len(events))
    for number, event in enumerate(events, sequence):
        _fill(message.events.add(sequence=number), event, with_tokens=with_tokens, with_keys=with_keys)
    return message


def snapshot_batches(
    stored: Sequence[tuple[int, BlockContent]], sequence: int, *, with_tokens: bool, with_keys: bool = False
) -> Iterator[pb.WatchKvEventsResponse]:
    """A state as the events that make it: all cleared, then what is stored, in as many messages as it takes."""
    message = pb.WatchKvEventsResponse(is_snapshot=True)
    message.events.add(sequence=sequence - 1).cleared.SetInParent()
    for block_id, content in stored:
        if len(message.events) == MAX_EVENTS:
            yield message
            message = pb.WatchKvEventsResponse(is_snapshot=True)
        event = message.events.add(sequence=sequence - 1)
        _fill(event, (block_id, content, True), with_tokens=with_tokens, with_keys=with_keys)
    message.next_sequence = sequence
    yield message


def _fill(message: pb.KvEvent, event: BlockEvent, *, with_tokens: bool, with_keys: bool) -> None:
    block_id, content, is_stored = event
    if content is None:
        message.cleared.SetInParent()
    elif is_stored:
        stored = message.stored
        stored.block_id = block_id
        stored.block_hash = content.block_hash
        stored.content_id = content.serial
        stored.group = group_of(content)
        stored.medium = pb.KV_MEDIUM_DEVICE
        if content.parent is not None:
            stored.parent_block_hash = parent_hash_of(content, content.parent)
            stored.parent_content_id = content.parent.serial
        if with_tokens:
            stored.token_ids.CopyFrom(Int32Array(data=content.token_bytes))
        if with_keys and content.extra_keys:
            fill_keys(stored, content.extra_keys)
    else:
        removed = message.removed
        removed.block_id = block_id
        removed.block_hash = content.block_hash
        removed.content_id = content.serial
        removed.group = group_of(content)
        removed.medium = pb.KV_MEDIUM_DEVICE


def fill_keys(message: pb.KvBlockStored | pb.BlockRecord | pb.PinnedPrefix, encoded: bytes) -> None:
    """Tell a content's keys. What stands behind tokens is none of them here: no request of an executor has that."""
    for domain, value in decode_extra_keys(encoded):
        field = _KEY_FIELDS.get(domain)
        if field is not None:
            setattr(message.keys, field, value.decode(errors="replace"))  # an adopted block's are an executor's word
