"""Encoding: special tokens, long texts in a thread, hopeless texts not at all."""

from __future__ import annotations

import threading

import pytest
from tokenizers import models, normalizers

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.text.tokenizer import INLINE_CHARS, UNKNOWN_RATIO, Tokenizer
from tests.unit.manager.manager_builders import CORPUS, byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer().to_str().encode())


async def test_encode_special_tokens_are_added_on_demand_only() -> None:
    plain = await TOKENIZER.encode("the dog", add_special_tokens=False, max_tokens=99)
    assert list(await TOKENIZER.encode("the dog", add_special_tokens=True, max_tokens=99)) == [0, *plain]


async def test_encode_long_text_in_thread_equals_encode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    inner = TOKENIZER._encode_batch
    monkeypatch.setattr(
        TOKENIZER, "_encode_batch", lambda *args: (threads.append(threading.get_ident()), inner(*args))[1]
    )
    text = "\n".join(CORPUS) * 10
    assert len(text) > INLINE_CHARS
    ids = await TOKENIZER.encode(text, add_special_tokens=True, max_tokens=100_000)
    assert list(ids) == byte_level_tokenizer().encode(text).ids
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_encode_hopeless_text_is_refused_before_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "_encode_batch", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(InvalidRequestError, match="shorten it") as caught:
        await TOKENIZER.encode("a" * 10_000_000, add_special_tokens=True, max_tokens=100)
    assert caught.value.reason == "PROMPT_TOO_LONG"


async def test_encode_text_of_longest_tokens_is_never_refused() -> None:
    raw = byte_level_tokenizer().from_str(byte_level_tokenizer().to_str())
    longest = "<a token longer than any other>"
    raw.add_tokens([longest])
    tokenizer = Tokenizer(raw.to_str().encode())
    assert tokenizer.longest_token_bytes == len(longest)
    assert len(await tokenizer.encode(longest * 300, add_special_tokens=False, max_tokens=300)) == 300
    with pytest.raises(InvalidRequestError):
        await tokenizer.encode(longest * 300 + "x", add_special_tokens=False, max_tokens=300)


def test_longest_token_tokenizer_that_drops_bytes_is_generous() -> None:
    raw = byte_fallback_tokenizer(strip=False)
    exact = Tokenizer(raw.to_str().encode()).longest_token_bytes
    shrinking = byte_level_tokenizer().from_str(raw.to_str())
    shrinking.normalizer = normalizers.NFKC()
    assert Tokenizer(shrinking.to_str().encode()).longest_token_bytes == exact * UNKNOWN_RATIO
    unknown = byte_level_tokenizer().from_str(raw.to_str())
    assert isinstance(unknown.model, models.BPE)
    unknown.model.byte_fallback = False
    assert Tokenizer(unknown.to_str().encode()).longest_token_bytes == exact * UNKNOWN_RATIO


def test_tokenizer_truncation_and_padding_of_the_file_are_off() -> None:
    raw = byte_level_tokenizer().from_str(byte_level_tokenizer().to_str())
    raw.enable_truncation(3)
    raw.enable_padding(length=9)
    ids = Tokenizer(raw.to_str().encode())._encode_batch("the quick brown fox", False)
    assert list(ids) == byte_level_tokenizer().encode("the quick brown fox", add_special_tokens=False).ids


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"version": "1.0"}'])
def test_tokenizer_broken_file_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json|Expecting"):
        Tokenizer(content)
