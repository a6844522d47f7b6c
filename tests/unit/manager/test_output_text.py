"""Text of an output: detokeniser, stop strings and resumption together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager_service.text.output_text import OutputText
from kvmanager_service.text.stop_strings import StopStrings
from kvmanager_service.text.tokenizer import Tokenizer
from tests.unit.manager.manager_builders import byte_fallback_tokenizer, byte_level_tokenizer, text_model

FALLBACK = Tokenizer(byte_fallback_tokenizer(strip=True).to_str().encode())
LEVEL = text_model().tokenizer


def make(tokenizer: Tokenizer, stops: list[str], min_tokens: int = 0) -> OutputText:
    return OutputText(tokenizer.detokenizer(), StopStrings(stops, include=False) if stops else None, min_tokens)


def run(text: OutputText, ids: list[int]) -> list[str]:
    """Push until a match; the text of each push, and the rest."""
    parts = []
    for token_id in ids:
        parts.append(text.push(token_id))
        if text.match is not None:
            return parts
    return [*parts, text.finish()]


@settings(max_examples=300)
@given(data=st.data())
def test_output_text_resumed_anywhere_goes_on_without_gap_or_repeat(data: st.DataObject) -> None:
    tokenizer, vocab = data.draw(st.sampled_from([(LEVEL, 600), (FALLBACK, 480)]))
    ids = data.draw(st.lists(st.integers(0, vocab - 1), max_size=30))
    stops = data.draw(st.lists(st.sampled_from([" the", "e", "\n\n", "ü", "a b", "я"]), max_size=3, unique=True))
    undisturbed = run(make(tokenizer, stops), ids)
    at = data.draw(st.integers(0, max(0, len(undisturbed) - 2)))
    resumed = make(tokenizer, stops)
    for token_id in ids[:at]:
        resumed.push(token_id)
    assert undisturbed[:at] + run(resumed, ids[at:]) == undisturbed


def test_output_text_match_before_min_tokens_does_not_count() -> None:
    ids = byte_level_tokenizer().encode("a.b.c.", add_special_tokens=False).ids
    assert len(ids) == 6
    text = make(LEVEL, ["."], min_tokens=4)
    assert "".join(run(text, ids)) == "a.b"
    assert text.num_tokens == 4


def test_output_text_match_in_released_bytes_ends_the_text() -> None:
    vocab = byte_fallback_tokenizer(strip=True).get_vocab()
    text = make(FALLBACK, ["€"])
    assert [text.push(vocab[f"<0x{byte:02X}>"]) for byte in "x€y".encode()] == [""] * 5
    assert text.finish() == "x"
    assert text.match == "€"


def test_output_text_held_beginning_of_stop_comes_at_the_end() -> None:
    ids = byte_level_tokenizer().encode("the do", add_special_tokens=False).ids
    text = make(LEVEL, [" dog"])
    assert "".join(run(text, ids)) == "the do"
    assert text.match is None
