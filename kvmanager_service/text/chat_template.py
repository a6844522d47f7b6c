"""A conversation to text, by the model's own Jinja template.

Station: part of `text_model.TextModel`. The template comes with the model and is run in a sandbox that can neither
reach Python's attributes nor mutate what it is given. It is offered what `transformers` offers to templates, so that
the templates that models ship work unchanged.

Source: the environment is that of `transformers.utils.chat_template_utils`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvmanager_service.core.errors import InvalidRequestError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A compiled chat template with the special tokens it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """Compile a template.

        Args:
            source: the Jinja text.
            special_tokens: `bos_token` and the like.
            now: the time that `strftime_now` tells.

        Raises:
            ValueError: the template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template: expected valid Jinja, got: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the conversation as text that ends where the assistant begins to speak.

        Args:
            messages: role and content of each turn, oldest first.

        Raises:
            InvalidRequestError: the template refuses the conversation, such as for its order of roles.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                "CHAT_TEMPLATE_REFUSED",
                f"chat: expected a conversation that the model's chat template accepts, got a refusal: {error}",
                field="chat",
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump as JSON without escapes: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which marks for training what the assistant said."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
