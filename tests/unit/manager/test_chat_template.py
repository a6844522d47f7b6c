"""Chat templates see what transformers shows them, and nothing else."""

from __future__ import annotations

import datetime

import pytest

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.text.chat_template import ChatTemplate
from tests.unit.manager.manager_builders import CHATML

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Grüße <b>"}]


def test_chat_template_chatml_ends_where_assistant_begins() -> None:
    assert ChatTemplate(CHATML, {}).render(MESSAGES) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nGrüße <b><|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_special_tokens_and_absent_tools_are_offered() -> None:
    source = "{{ bos_token }}{% if not tools and not documents %}{{ messages[1].content }}{{ eos_token }}{% endif %}"
    assert ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES) == "<s>Grüße <b></s>"


def test_chat_template_blocks_leave_no_line_behind() -> None:
    source = "a\n  {% if true %}\nb\n  {% endif %}\nc"
    assert ChatTemplate(source, {}).render(MESSAGES) == "a\nb\nc"


def test_chat_template_loop_controls_and_generation_blocks_are_known() -> None:
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(MESSAGES) == "Be kind."


def test_chat_template_tojson_keeps_letters_and_tags() -> None:
    assert ChatTemplate("{{ messages[1] | tojson }}", {}).render(MESSAGES) == '{"role": "user", "content": "Grüße <b>"}'
    assert ChatTemplate("{{ [1] | tojson(indent=1) }}", {}).render(MESSAGES) == "[\n 1\n]"


def test_chat_template_strftime_now_tells_the_time() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, now=lambda: datetime.datetime(2024, 5, 6))
    assert template.render(MESSAGES) == "2024-05-06"


def test_chat_template_raise_exception_is_the_users_error() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match="must begin with user") as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.reason == "CHAT_TEMPLATE_REFUSED"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_chat_template_that_reaches_out_of_the_sandbox_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}).render(MESSAGES)


def test_chat_template_bad_jinja_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected valid Jinja"):
        ChatTemplate("{% if %}", {})
