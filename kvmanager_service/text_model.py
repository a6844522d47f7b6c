"""The text side of the served model: tokenizer, chat template, special tokens.

Station: built by `executor_checks` from the files the executor ships, in a thread, since it takes a second for a large
vocabulary; then part of `ModelView`. Executors of one model fingerprint share one.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvmanager_service.errors import PreconditionError
from kvmanager_service.text.chat_template import ChatTemplate
from kvmanager_service.text.tokenizer import INLINE_CHARS, Tokenizer

__all__ = ["INLINE_TURNS", "TextModel"]

INLINE_TURNS = 100
"""Conversations of up to this many turns, and short, are rendered on the loop: about 5 us for a turn."""


class TextModel:
    """Text to tokens and back for one model.

    Attributes:
        tokenizer: the tokenizer.
        chat_template: the model's chat template, or None when it has none.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self | None:
        """Build it from a tokenizer's files.

        Args:
            files: plain file name to content. Read are tokenizer.json, tokenizer_config.json, special_tokens_map.json
                and chat_template.jinja; the last wins over a template in tokenizer_config.json.

        Returns:
            The text model, or None when there is no tokenizer.json.

        Raises:
            ValueError: a file is not what its name says.
        """
        if "tokenizer.json" not in files:
            return None
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        special = json.loads(files.get("special_tokens_map.json", b"{}"))
        source = _template_source(files, config)
        template = None if source is None else ChatTemplate(source, _special_tokens(special | config))
        return cls(Tokenizer(files["tokenizer.json"]), template)

    async def encode_text(self, text: str, max_model_len: int) -> array[int]:
        """Cut a prompt into tokens, the model's special tokens added.

        Raises:
            InvalidRequestError: it is too long for the model whatever its tokens are.
        """
        return await self.tokenizer.encode(text, add_special_tokens=True, max_tokens=max_model_len)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], max_model_len: int) -> array[int]:
        """Turn a conversation into tokens; the template itself writes the special tokens.

        Raises:
            PreconditionError: the model has no chat template.
            InvalidRequestError: the template refuses it, or it is too long for the model whatever its tokens are.
        """
        if self.chat_template is None:
            raise PreconditionError(
                "NO_CHAT_TEMPLATE",
                "chat: expected a model with a chat template, got one without; send text or token_ids",
                field="chat",
            )
        size = sum(len(message["content"]) for message in messages)
        if len(messages) <= INLINE_TURNS and size <= INLINE_CHARS:
            text = self.chat_template.render(messages)
        else:
            text = await asyncio.to_thread(self.chat_template.render, messages)
        return await self.tokenizer.encode(text, add_special_tokens=False, max_tokens=max_model_len)


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens as text; a token may be given as text or with its properties."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
