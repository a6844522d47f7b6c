"""The text of one request's output: detokenised, watched for stop strings, let out piece by piece.

Station: owned by the request's stream in `output_stream`; made by `admission`.

Tokens are pushed one by one, so that what is let out after n tokens depends on those n tokens only. That is why a
resumed stream goes on exactly where the broken one was: the tokens it hands in are pushed again, their text is dropped.
"""

from __future__ import annotations

from kvmanager_service.text.detokenizer import Detokenizer
from kvmanager_service.text.stop_strings import StopStrings

__all__ = ["OutputText"]


class OutputText:
    """Turns output tokens into text.

    Attributes:
        num_tokens: tokens pushed so far.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_stop", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, stop: StopStrings | None, min_tokens: int) -> None:
        """Use a fresh detokenizer; matches completed before token number `min_tokens` do not count."""
        self._detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def match(self) -> str | None:
        """The stop string that ended the output."""
        return None if self._stop is None else self._stop.match

    def push(self, token_id: int) -> str:
        """Add a token and return the text to let out. Nothing may be pushed after a match."""
        self.num_tokens += 1
        text = self._detokenizer.push(token_id)
        if self._stop is None:
            return text
        return self._stop.push(text, may_stop=self.num_tokens >= self._min_tokens)

    def finish(self) -> str:
        """Return the rest of the text: unfinished characters and what might have become a stop string.

        Released bytes may complete a stop string; `match` is set then and the rest ends there.
        """
        text = self._detokenizer.flush()
        if self._stop is None:
            return text
        text = self._stop.push(text, may_stop=self.num_tokens >= self._min_tokens)
        return text if self._stop.match is not None else text + self._stop.flush()
