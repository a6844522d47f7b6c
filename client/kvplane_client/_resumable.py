"""One request across all its attempts: what was sent, what came back, and what the next attempt must say.

Station: shared by the single stream and the multiplexed one, which own the calls; this owns the state.

How a broken stream goes on without a gap or a repeat:

1. Text and token ids of one piece travel in one message, so what arrived of an output is always the whole output of
   the server for some prefix of its tokens.
2. The next attempt sends that prefix as ``resume_token_ids``, or those of several outputs, and which of them have
   finished, as ``resume_outputs``; with the seed fixed since the first attempt.
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
_MAX_ID_LENGTH_OF_SEVERAL = 252


class _Output:
    """What has arrived of one output.

    Attributes:
        token_ids: All its tokens.
        has_usage: Its first usage.
        is_finished: Its last piece.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.has_usage = False
        self.is_finished = False


class ResumableRequest:
    """The state of one request.

    Args:
        request: The request of the first attempt; it has an id. Tokens that it is to go on from are as if they had
            arrived.

    Attributes:
        request: That, without these tokens.
        first_token_ids: These tokens.
        request_id: The id users know.
        wire_id: The id of the current attempt.
        num_outputs: How many outputs it has.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.request = request
        self.num_outputs = max(1, request.n)
        self._outputs = [_Output() for _ in range(self.num_outputs)]
        self.first_token_ids = list(request.resume_token_ids.ids)
        self._outputs[0].token_ids += self.first_token_ids
        request.ClearField("resume_token_ids")
        self._num_open = self.num_outputs
        self._cached_tokens: int | None = None
        self._has_begun = False
        self._renamed = 0
        self.request_id = request.request_id
        self.wire_id = request.request_id

    @property
    def finished(self) -> bool:
        """Whether the last piece of every output has arrived."""
        return not self._num_open

    def attempt(self) -> pb.GenerateRequest:
        """Returns the message that starts the current attempt."""
        message = pb.GenerateRequest()
        message.CopyFrom(self.request)
        message.request_id = self.wire_id
        if self.num_outputs == 1:
            if self._outputs[0].token_ids:
                message.resume_token_ids.ids.extend(self._outputs[0].token_ids)
        elif self._has_begun:
            for output in self._outputs:
                token_ids = () if output.is_finished else output.token_ids
                message.resume_outputs.add(token_ids=token_ids, is_finished=output.is_finished)
        return message

    def accept(self, response: pb.GenerateResponse) -> Chunk:
        """Takes the next piece of output.

        Returns:
            The piece as users see it: under the id they know, with usage in an output's first and last piece only, and
            with the cached tokens of the first admission.
        """
        self._has_begun = True
        output = self._outputs[response.index]
        output.token_ids.extend(response.token_ids)
        finish_reason = finish_reason_from(response.finish_reason)
        output.is_finished = finish_reason is not None
        self._num_open -= output.is_finished
        return Chunk(
            request_id=self.request_id,
            text=response.text,
            token_ids=tuple(response.token_ids),
            logprobs=logprobs_from(response),
            finish_reason=finish_reason,
            stop_match=stop_match_from(response),
            usage=self._usage_of(response, output),
            index=response.index,
        )

    def prepare_retry(self, error: KvPlaneError) -> None:
        """Makes ``attempt()`` the one that follows a failure.

        Args:
            error: The failure. One without a reason came from the connection, so the server may not know of it yet.
        """
        refused_by_server = bool(error.reason) and not self._has_begun
        if not refused_by_server:
            self.request.ClearField("fork_of")  # its parent's attempt may have ended with this one
            self._renamed += 1
            suffix = f"~{self._renamed}"
            longest = _MAX_ID_LENGTH if self.num_outputs == 1 else _MAX_ID_LENGTH_OF_SEVERAL
            self.wire_id = self.request_id[: longest - len(suffix)] + suffix

    def _usage_of(self, response: pb.GenerateResponse, output: _Output) -> Usage | None:
        if not response.HasField("usage"):
            return None
        usage = usage_from(response.usage)
        if self._cached_tokens is None:
            self._cached_tokens = usage.cached_tokens
        had_usage, output.has_usage = output.has_usage, True
        if had_usage and not output.is_finished:
            return None
        return Usage(usage.prompt_tokens, usage.completion_tokens, self._cached_tokens)
