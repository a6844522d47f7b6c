"""From a prompt and keyword arguments to a GenerateRequest.

Station: the entry of every generating method. Ranges are the server's business (it knows the model); here only what
the wire cannot carry at all is refused, with the parameter's name.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb

from kvplane_client.errors import InvalidArgumentError
from kvplane_client.types import ChatMessage, GenerateOptions, Prompt, Retention, RetentionLevel

__all__ = ["build_pin", "build_request"]

_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "logprobs",
)  # fmt: skip
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "include_stop")
_REQUEST = ("n", "priority", "retention_priority", "cache_salt", "tenant", "adapter")
_SEED_BITS = 63


def build_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Builds the request of the first attempt.

    Args:
        prompt: Text, token ids or a conversation.
        options: The keyword arguments the user gave; deadline is not part of the request.

    Returns:
        A request with an id and, when it samples at random, a seed: a later attempt then continues the same output.

    Raises:
        InvalidArgumentError: A value has a type or a size the wire cannot carry.
        TypeError: An option is unknown.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown options {sorted(unknown)}; expected some of {sorted(GenerateOptions.__annotations__)}"
        )
    request = pb.GenerateRequest(request_id=_text("request_id", options.get("request_id")) or _new_id())
    _set_prompt(request, prompt)
    _copy(options, _SAMPLING, request.sampling)
    _copy(options, _STOPPING, request.stopping)
    _copy(options, _REQUEST, request)
    if request.n == 1:
        request.ClearField("n")  # it is the default, and no manager is too old for it
    _set_collections(request, options)
    _set_retention(request, options.get("retention"))
    _fix_seed(request.sampling)
    return request


def build_fork(
    parent: pb.GenerateRequest, output: tuple[str, int], token_ids: Sequence[int], request_id: str, seed: int | None
) -> pb.GenerateRequest:
    """Builds the request of the first attempt of one that branches off from another.

    Args:
        parent: The request of the other's first attempt; all but the id and the seed is its.
        output: What is shared with: the id of the other's current attempt, and which of its outputs.
        token_ids: The output tokens it begins with.
        request_id: Its id; empty lets one be chosen.
        seed: Its seed; None draws one where it samples at random.

    Raises:
        InvalidArgumentError: A value has a type or a size the wire cannot carry.
    """
    request = pb.GenerateRequest()
    request.CopyFrom(parent)
    request.request_id = _text("request_id", request_id) or _new_id()
    request.ClearField("n")
    request.sampling.ClearField("seed")
    _copy({} if seed is None else {"seed": seed}, _SAMPLING, request.sampling)
    _fix_seed(request.sampling)
    _extend("token_ids", request.resume_token_ids.ids, token_ids)
    wire_id, index = output
    request.fork_of = f"{wire_id}#{index}" if index else wire_id
    return request


def build_pin(
    name: str, prefix: str | Sequence[int], cache_salt: str = "", tenant: str = "", adapter: str = ""
) -> manager_pb.PinPrefixRequest:
    """Builds the request that pins a prefix.

    Raises:
        InvalidArgumentError: A value has a type or a size the wire cannot carry.
    """
    request = manager_pb.PinPrefixRequest(
        name=_text("name", name),
        cache_salt=_text("cache_salt", cache_salt),
        tenant=_text("tenant", tenant),
        adapter=_text("adapter", adapter),
    )
    if isinstance(prefix, str):
        request.text = _text("prefix", prefix)
    elif not isinstance(prefix, Iterable) or isinstance(prefix, (bytes, Mapping)):
        raise _refusal("prefix", "a string or token ids", prefix)
    else:
        request.token_ids.SetInParent()
        _extend("prefix", request.token_ids.ids, prefix)
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
        return
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, Mapping)):
        raise _refusal("prompt", "a string, token ids or chat messages", prompt)
    items: Sequence[Any] = list(prompt)
    if not items:
        raise InvalidArgumentError("prompt: expected at least one token or message, got an empty sequence")
    if isinstance(items[0], (ChatMessage, Mapping)):
        request.chat.messages.extend(_chat_message(item) for item in items)
    else:
        _extend("prompt", request.token_ids.ids, items)


def _chat_message(message: ChatMessage | Mapping[str, str]) -> pb.ChatMessage:
    if isinstance(message, ChatMessage):
        return pb.ChatMessage(role=_text("role", message.role), content=_text("content", message.content))
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        raise _refusal("prompt", 'a ChatMessage or a mapping with exactly "role" and "content"', message)
    return pb.ChatMessage(role=_text("role", message["role"]), content=_text("content", message["content"]))


def _set_collections(request: pb.GenerateRequest, options: GenerateOptions) -> None:
    stop = options.get("stop") or ()
    request.stopping.stop.extend(_text("stop", item) for item in ([stop] if isinstance(stop, str) else stop))
    _extend("stop_token_ids", request.stopping.stop_token_ids, options.get("stop_token_ids") or ())
    for token_id, bias in (options.get("logit_bias") or {}).items():
        try:
            request.sampling.logit_bias[token_id] = bias
        except (TypeError, ValueError) as error:
            raise _refusal("logit_bias", "a mapping from token ids to numbers", {token_id: bias}) from error


def _set_retention(request: pb.GenerateRequest, retention: Retention | None) -> None:
    if retention is None:
        return
    if not isinstance(retention, Retention):
        raise _refusal("retention", "a Retention", retention)
    try:
        for one in retention.ranges:
            request.retention.ranges.add(start=one.start, stop=one.stop, level=_retention_level(one.level))
        if retention.decode is not None:
            request.retention.decode.CopyFrom(_retention_level(retention.decode))
    except (TypeError, ValueError, OverflowError) as error:
        raise _refusal("retention", f"values that a request can carry ({error})", retention) from error


def _retention_level(level: RetentionLevel) -> pb.RetentionLevel:
    """A level as it is sent. A duration is rounded up to a millisecond: 0 would be one without an end."""
    duration_ms = 0
    if level.duration is not None:
        if not level.duration > 0:
            raise ValueError(f"duration: expected seconds above 0, or None for no end, got {level.duration}")
        duration_ms = math.ceil(level.duration * 1000)
    return pb.RetentionLevel(priority=level.priority, duration_ms=duration_ms)


def _copy(options: GenerateOptions, names: Iterable[str], message: Any) -> None:
    """Sets the fields that the user gave."""
    for name in names:
        value = options.get(name)
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise _refusal(name, f"a value that a request can carry ({error})", value) from error


def _extend(name: str, field: Any, values: Iterable[Any]) -> None:
    """Appends integers, numpy's included."""
    for value in values:
        if isinstance(value, bool):  # an integer to Python, and a slip of whoever passes one
            raise _refusal(name, "token ids as 32-bit integers", value)
        try:
            field.append(operator.index(value))
        except (TypeError, ValueError) as error:
            raise _refusal(name, "token ids as 32-bit integers", value) from error


def _text(name: str, value: object) -> str:
    """Checks that a value is text that UTF-8 can carry."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _refusal(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name}: expected text without lone surrogates: {error}") from error
    return value


def _new_id() -> str:
    return f"req-{secrets.token_hex(8)}"


def _fix_seed(sampling: pb.SamplingParams) -> None:
    greedy = sampling.HasField("temperature") and sampling.temperature == 0
    if not greedy and not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(_SEED_BITS)


def _refusal(name: str, expected: str, got: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: expected {expected}, got {got!r}", metadata={"parameter": name})
