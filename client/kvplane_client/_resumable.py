"""One request across all its attempts: what was sent, what came back, and what the next attempt must say.

Station: shared by the single stream and the multiplexed one, which own the calls; this owns the state.

How a broken stream goes on without a gap or a repeat:

1. Text and token ids of one piece travel in one message, so what arrived is always the whole output of the server
   for some prefix of the tokens.
2. The next attempt sends that prefix as ``resume_token_ids``, with the seed fixed since the first attempt.
3. The server runs those tokens through the same detokeniser and stop-string hold-back as before and delivers none of
   what that yields. The process is deterministic, so what it skips is exactly what arrived.
4. An attempt whose predecessor may still be alive in the manager gets an id of its own (``id~1``, ``id~2``, …), or it
   would be refused with ALREADY_EXISTS. Users see the id they know.
"""

from __future__ import annotations

from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvplane_client._convert import finish_reason_from, logprobs_from, stop_match_from, usage_from
from kvplane_client.errors import KvPlaneError
from kvplane_client.types import Chunk, Usage

__all__ = ["ResumableRequest"]

_MAX_ID_LENGTH = 256


class ResumableRequest:
    """The state of one request.

    Args:
        request: The request of the first attempt; it has an id.

    Attributes:
        request_id: The id users know.
        wire_id: The id of the current attempt.
        finished: The last piece of every output has arrived.
        num_outputs: How many outputs it has.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._usage: Usage | None = None
        self._renamed = 0
        self._num_open = max(1, request.n)
        self.num_outputs = self._num_open
        self.request_id = request.request_id
        self.wire_id = request.request_id
        self.finished = False

    def attempt(self) -> pb.GenerateRequest:
        """Returns the message that starts the current attempt."""
        message = pb.GenerateRequest()
        message.CopyFrom(self._request)
        message.request_id = self.wire_id
        if self._token_ids:
            message.resume_token_ids.ids.extend(self._token_ids)
        return message

    def accept(self, response: pb.GenerateResponse) -> Chunk:
        """Takes the next piece of output.

        Returns:
            The piece as users see it: under the id they know, with usage in the first and the last piece only, and with
            the cached tokens of the first admission.
        """
        self._token_ids.extend(response.token_ids)
        finish_reason = finish_reason_from(response.finish_reason)
        self._num_open -= finish_reason is not None
        self.finished = not self._num_open
        return Chunk(
            request_id=self.request_id,
            text=response.text,
            token_ids=tuple(response.token_ids),
            logprobs=logprobs_from(response),
            finish_reason=finish_reason,
            stop_match=stop_match_from(response),
            usage=self._usage_of(response, is_last=finish_reason is not None),
            index=response.index,
        )

    @property
    def can_go_on(self) -> bool:
        """Whether another attempt continues what has arrived: of several outputs nothing may have."""
        return self.num_outputs == 1 or self._usage is None

    def prepare_retry(self, error: KvPlaneError) -> None:
        """Makes ``attempt()`` the one that follows a failure.

        Args:
            error: The failure. One without a reason came from the connection, so the server may not know of it yet.
        """
        refused_by_server = bool(error.reason) and self._usage is None and not self._token_ids
        if not refused_by_server:
            self._renamed += 1
            suffix = f"~{self._renamed}"
            self.wire_id = self.request_id[: _MAX_ID_LENGTH - len(suffix)] + suffix

    def _usage_of(self, response: pb.GenerateResponse, *, is_last: bool) -> Usage | None:
        if not response.HasField("usage"):
            return None
        usage = usage_from(response.usage)
        if self.num_outputs > 1:  # never resumed once it has begun
            self._usage = usage
            return usage
        first = self._usage
        self._usage = first or usage
        if first is None:
            return usage
        if not is_last:
            return None
        return Usage(usage.prompt_tokens, usage.completion_tokens, first.cached_tokens)
