"""Builders of the manager's tests: one per domain object, small and real."""

from __future__ import annotations

import functools
import json
from array import array
from typing import Any

import tokenizers
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvmanager_service.core.request import FinishReason, RequestOutput
from kvmanager_service.engine_api import ModelView
from kvmanager_service.text_model import TextModel

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "def add(a, b):\n    return a + b  # adds\n\n\nprint(add(1, 2))",
    "Größe, Übermut und Ärger: straße, naïve café, façade.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "天地玄黄,宇宙洪荒。日月盈昃,辰宿列张。",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ",
    "नमस्ते दुनिया, यह एक परीक्षण है।",
    "👩‍👩‍👧 emoji 🎉🎉 and flags 🇩🇪🇯🇵 and 𝔪𝔞𝔱𝔥",
    "مرحبا بالعالم، هذا اختبار.",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """A GPT-2-like tokenizer with special tokens and an added token that is not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("größe x", special=False), AddedToken("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
    )
    return tokenizer


@functools.cache
def byte_fallback_tokenizer(*, strip: bool) -> tokenizers.Tokenizer:
    """A SentencePiece-like tokenizer: Llama 2's decoder with `strip`, Gemma's without."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tail: list[Any] = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        limit_alphabet=60,
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    # Byte tokens are ordinary tokens of the model, not special ones: take their mark away as converters do.
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(config))


def text_model(*, chat: bool = True) -> TextModel:
    """The byte-level tokenizer with a ChatML template."""
    files = {"tokenizer.json": byte_level_tokenizer().to_str().encode()}
    if chat:
        files["tokenizer_config.json"] = json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}).encode()
    model = TextModel.from_files(files)
    assert model is not None
    return model


def model_view(text: TextModel | None = None, **changes: Any) -> ModelView:
    """A model of 600 tokens and length 128."""
    values: dict[str, Any] = {
        "name": "tiny",
        "fingerprint": "f1",
        "max_model_len": 128,
        "vocab_size": 610,
        "eos_token_ids": (0,),
        "max_logprobs": 5,
        "dtype": "float32",
        "text": text,
    }
    return ModelView(**(values | changes))


def generate_request(*ids: int, request_id: str = "", **changes: Any) -> pb.GenerateRequest:
    """A request of token ids; 1, 2, 3 when none are given."""
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=ids or (1, 2, 3)), **changes)


def output(*token_ids: int, request_id: str = "r", finish: FinishReason | None = None, **changes: Any) -> RequestOutput:
    """What one step brought."""
    return RequestOutput(request_id, list(token_ids), finish_reason=finish, **changes)


def int32s(data: bytes) -> list[int]:
    """The token ids in a core value."""
    return array("i", data).tolist()
