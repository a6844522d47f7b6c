"""A text model from a tokenizer's files."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence

import pytest

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.errors import PreconditionError
from kvmanager_service.text.chat_template import ChatTemplate
from kvmanager_service.text_model import TextModel
from tests.unit.manager.manager_builders import CHATML, byte_level_tokenizer, text_model

RAW = byte_level_tokenizer().to_str().encode()
USER = [{"role": "user", "content": "hi"}]


def build(**files: object) -> TextModel:
    content = {name.replace("__", "."): value for name, value in files.items()}
    encoded = {
        name: value.encode() if isinstance(value, str) else json.dumps(value).encode()
        for name, value in content.items()
    }
    model = TextModel.from_files({"tokenizer.json": RAW} | encoded)
    assert model is not None
    return model


def rendered(model: TextModel) -> str:
    assert model.chat_template is not None
    return model.chat_template.render(USER)


def test_text_model_without_tokenizer_json_is_none() -> None:
    assert TextModel.from_files({"tokenizer_config.json": b"{}"}) is None


def test_text_model_without_template_refuses_chat() -> None:
    assert build().chat_template is None


async def test_text_model_chat_without_template_is_a_precondition() -> None:
    with pytest.raises(PreconditionError, match="send text or token_ids"):
        await build().encode_chat(USER, 99)


async def test_text_model_chat_special_tokens_come_from_template_only() -> None:
    ids = await text_model().encode_chat(USER, 99)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(ids) == byte_level_tokenizer().encode(text, add_special_tokens=False).ids
    assert ids[0] == byte_level_tokenizer().token_to_id("<|im_start|>")


@pytest.mark.parametrize(("turns", "chars", "on_loop"), [(100, 20, True), (101, 1, False), (1, 2_001, False)])
async def test_text_model_chat_that_is_long_is_rendered_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, turns: int, chars: int, on_loop: bool
) -> None:
    rendered_by: list[threading.Thread] = []
    render = ChatTemplate.render

    def note_and_render(template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str:
        rendered_by.append(threading.current_thread())
        return render(template, messages)

    monkeypatch.setattr(ChatTemplate, "render", note_and_render)
    messages = [{"role": "user", "content": "a" * chars}] * turns
    ids = await text_model().encode_chat(messages, 100_000)
    text = f"<|im_start|>user\n{'a' * chars}<|im_end|>\n" * turns + "<|im_start|>assistant\n"
    assert list(ids) == byte_level_tokenizer().encode(text, add_special_tokens=False).ids
    assert [thread is threading.current_thread() for thread in rendered_by] == [on_loop]


async def test_text_model_text_gets_special_tokens() -> None:
    assert (await text_model().encode_text("hi", 99))[0] == 0


def test_text_model_template_file_wins_over_config() -> None:
    model = build(tokenizer_config__json={"chat_template": "config"}, chat_template__jinja="file")
    assert rendered(model) == "file"


def test_text_model_named_templates_default_is_used() -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert rendered(build(tokenizer_config__json={"chat_template": named})) == "plain"


def test_text_model_special_tokens_as_text_or_properties() -> None:
    model = build(
        tokenizer_config__json={
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ add_bos_token }}",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "add_bos_token": True,
        },
        special_tokens_map__json={"unk_token": "<unk>", "bos_token": "older"},
    )
    assert rendered(model) == "<s></s><unk>"


async def test_text_model_hopeless_chat_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="shorten it"):
        await text_model().encode_chat([{"role": "user", "content": "a" * 1_000_000}], 10)


def test_text_model_broken_config_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        TextModel.from_files({"tokenizer.json": RAW, "tokenizer_config.json": b"{"})


def test_text_model_chatml_builder_renders() -> None:
    assert rendered(build(tokenizer_config__json={"chat_template": CHATML})).endswith("<|im_start|>assistant\n")
