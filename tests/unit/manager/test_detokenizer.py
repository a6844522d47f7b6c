"""Incremental decoding equals decoding at once, whatever the tokens are."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from kvmanager_service.text.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from kvmanager_service.text.tokenizer import Tokenizer
from tests.unit.manager.manager_builders import CORPUS, byte_fallback_tokenizer, byte_level_tokenizer

EXACT = {
    "byte_level": (byte_level_tokenizer(), ByteLevelDetokenizer),
    "byte_fallback": (byte_fallback_tokenizer(strip=False), ByteFallbackDetokenizer),
    "byte_fallback_strip": (byte_fallback_tokenizer(strip=True), ByteFallbackDetokenizer),
}
WRAPPED = {name: Tokenizer(raw.to_str().encode()) for name, (raw, _) in EXACT.items()}


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("family", EXACT)
def test_detokenizer_of_known_family_has_exact_kind(family: str) -> None:
    assert type(WRAPPED[family].detokenizer()) is EXACT[family][1]


@pytest.mark.parametrize("family", EXACT)
@settings(max_examples=300)
@given(data=st.data())
def test_detokenizer_random_ids_concatenate_to_decode_at_once(family: str, data: st.DataObject) -> None:
    raw = EXACT[family][0]
    # Ids beyond the tokenizer's vocabulary are what a model with a padded embedding can produce.
    ids = data.draw(st.lists(st.integers(0, raw.get_vocab_size() + 5), max_size=40))
    assert "".join(pieces_of(WRAPPED[family].detokenizer(), ids)) == raw.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", EXACT)
@settings(max_examples=300)
@given(data=st.data())
def test_detokenizer_random_bytes_concatenate_to_decode_at_once(family: str, data: st.DataObject) -> None:
    raw = EXACT[family][0]
    vocab = raw.get_vocab()
    if family == "byte_level":
        singles = sorted(token_id for token, token_id in vocab.items() if len(token) == 1)
    else:
        singles = [vocab[f"<0x{byte:02X}>"] for byte in range(256)]
    some = [vocab[next(iter(vocab))], vocab["a"]]
    ids = data.draw(st.lists(st.sampled_from([*singles, *some]), max_size=30))
    assert "".join(pieces_of(WRAPPED[family].detokenizer(), ids)) == raw.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", EXACT)
@settings(max_examples=200)
@given(text=st.text(max_size=60) | st.sampled_from(CORPUS))
def test_detokenizer_valid_text_no_piece_has_replacement_character(family: str, text: str) -> None:
    raw = EXACT[family][0]
    ids = raw.encode(text, add_special_tokens=False).ids
    whole = raw.decode(ids, skip_special_tokens=True)
    pieces = pieces_of(WRAPPED[family].detokenizer(), ids)
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


def test_byte_level_character_of_several_tokens_comes_when_complete() -> None:
    vocab = byte_level_tokenizer().get_vocab()
    # U+10FFFD is in no merge: four byte tokens, F4 8F BF BD.
    ids = byte_level_tokenizer().encode("\U0010fffd", add_special_tokens=False).ids
    assert len(ids) == 4
    detokenizer = WRAPPED["byte_level"].detokenizer()
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", "", "\U0010fffd"]
    assert detokenizer.push(vocab["a"]) == "a"


def test_byte_level_special_token_inside_character_does_not_break_it() -> None:
    ids = byte_level_tokenizer().encode("\U0010fffd", add_special_tokens=False).ids
    detokenizer = WRAPPED["byte_level"].detokenizer()
    assert "".join(pieces_of(detokenizer, [*ids[:2], 0, *ids[2:]])) == "\U0010fffd"


def test_byte_fallback_strip_first_space_of_output_is_cut_once() -> None:
    raw = byte_fallback_tokenizer(strip=True)
    ids = raw.encode("the dog the dog", add_special_tokens=False).ids
    pieces = pieces_of(WRAPPED["byte_fallback_strip"].detokenizer(), ids)
    assert "".join(pieces) == "the dog the dog"


def test_byte_fallback_run_that_never_ends_is_flushed() -> None:
    vocab = byte_fallback_tokenizer(strip=False).get_vocab()
    detokenizer = WRAPPED["byte_fallback"].detokenizer()
    assert detokenizer.push(vocab["<0xE2>"]) == ""
    assert detokenizer.push(vocab["<0x82>"]) == ""
    assert detokenizer.push(vocab["<0xAC>"]) == ""
    assert detokenizer.flush() == "€"


def metaspace_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def test_window_detokenizer_other_decoders_concatenate_to_decode_at_once() -> None:
    for raw in (metaspace_tokenizer(), wordpiece_tokenizer()):
        wrapped = Tokenizer(raw.to_str().encode())
        for text in CORPUS:
            ids = raw.encode(text, add_special_tokens=False).ids
            detokenizer = wrapped.detokenizer()
            assert isinstance(detokenizer, WindowDetokenizer)
            assert "".join(pieces_of(detokenizer, ids)) == raw.decode(ids, skip_special_tokens=True)


def test_window_detokenizer_byte_level_matches_exact_one_on_text() -> None:
    raw = byte_level_tokenizer()
    for text in CORPUS:
        ids = raw.encode(text, add_special_tokens=False).ids
        assert "".join(pieces_of(WindowDetokenizer(raw, frozenset({0, 1, 2})), ids)) == text


def test_window_detokenizer_endless_broken_bytes_keeps_window_short() -> None:
    raw = byte_level_tokenizer()
    detokenizer = WindowDetokenizer(raw, frozenset({0, 1, 2}))
    broken = raw.encode("\U0010fffd", add_special_tokens=False).ids[1]
    for _ in range(500):
        detokenizer.push(broken)
        assert len(detokenizer._window) <= 3 * WindowDetokenizer.MAX_HELD
