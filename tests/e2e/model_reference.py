"""What transformers itself makes of a prompt, and when another answer counts as the same.

Two float32 computations of one logit differ in their last bits. Where two tokens are that close, either is right: such
a place is a tie, and it is counted. Any other difference fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from executor_service.sampler import uniform

GREEDY_TIE = 1e-4
"""Difference of two logits."""
DRAWN_TIE = 1e-5
"""Distance, in probability, of the drawn number from a token's share."""
BATCH_SIZE = 20
"""Sequences that the reference generates together. Of prompts that are alike in length, so that little is padding."""
PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "varied.json"


@dataclass(frozen=True)
class Drawn:
    """Parameters of a random draw."""

    seed: int
    temperature: float
    top_p: float


class Reference:
    """A model run by transformers' own `generate`, in float32.

    What it made of a prompt is kept: the tests of a session ask for the same again and again.

    Attributes:
        tokenizer: the model's, as transformers reads it.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        eos: int | list[int] = self._model.generation_config.eos_token_id
        self._eos = {eos} if isinstance(eos, int) else set(eos)
        self._known: dict[tuple[tuple[int, ...], int, Drawn | None], list[int]] = {}

    def prepare(self, prompts: Sequence[Sequence[int]], count: int, drawn: Drawn | None = None) -> None:
        """Compute the tokens of many prompts together, which takes a fraction of the time; `tokens` then knows them."""
        unknown = sorted((prompt for prompt in prompts if (tuple(prompt), count, drawn) not in self._known), key=len)
        for start in range(0, len(unknown), BATCH_SIZE):
            batch = unknown[start : start + BATCH_SIZE]
            for prompt, tokens in zip(batch, self._generate(batch, count, drawn), strict=True):
                self._known[tuple(prompt), count, drawn] = tokens

    def tokens(self, prompt: Sequence[int], count: int, drawn: Drawn | None = None) -> list[int]:
        """The next tokens, at most `count`, greedy unless drawn; an end-of-sequence token is the last."""
        self.prepare([prompt], count, drawn)
        return self._known[tuple(prompt), count, drawn]

    def count_ties(self, prompt: Sequence[int], got: Sequence[int], count: int, drawn: Drawn | None = None) -> int:
        """Check an output against the reference; after a tie, against what the reference makes of the output so far."""
        right: list[int] = []
        ties = 0
        while True:
            expected = [*right, *self.tokens([*prompt, *right], count - len(right), drawn)]
            if list(got) == expected:
                return ties
            place = next(i for i in range(count) if got[i : i + 1] != expected[i : i + 1])
            assert len(got) > place, f"expected {len(expected)} tokens, got {len(got)}, the same as far as they go"
            self._require_tie([*prompt, *expected[:place]], expected[place], got[place], drawn)
            ties += 1
            right = list(got[: place + 1])

    def _require_tie(self, prefix: list[int], expected: int, got: int, drawn: Drawn | None) -> None:
        with torch.inference_mode():
            logits = self._model(torch.tensor([prefix]), logits_to_keep=1).logits[0, -1]
        if drawn is None:
            distance, allowed = float(logits[expected] - logits[got]), GREEDY_TIE
        else:
            distance, allowed = _distance(logits, drawn, len(prefix), got), DRAWN_TIE
        assert distance <= allowed, f"after {len(prefix)} tokens expected {expected}, got {got}: {distance} apart"

    def _generate(self, prompts: Sequence[Sequence[int]], count: int, drawn: Drawn | None) -> list[list[int]]:
        """One call of `generate`; shorter prompts are padded on the left, where the mask hides it."""
        length = max(map(len, prompts))
        padding = torch.tensor([length - len(prompt) for prompt in prompts])
        pad = min(self._eos)
        ids = torch.tensor([[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts])
        out = self._model.generate(
            ids,
            attention_mask=(torch.arange(length) >= padding[:, None]).long(),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList([] if drawn is None else [_Draw(drawn, padding.tolist())]),
        )
        return [self._until_end(row) for row in out[:, length:].tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Without what pads a sequence that ended before others of its batch."""
        ends = [index for index, token in enumerate(tokens) if token in self._eos]
        return tokens[: ends[0] + 1] if ends else tokens


class _Draw(LogitsProcessor):
    """Leaves one token of each sequence to be chosen: the one that the seed and the position draw."""

    def __init__(self, drawn: Drawn, padding: list[int]) -> None:
        self._drawn = drawn
        self._padding = padding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        for row, padding in enumerate(self._padding):
            ids, cumulative = _nucleus(scores[row], self._drawn)
            number = _number(self._drawn, input_ids.shape[1] - padding) * cumulative[-1]
            allowed[row, int(ids[np.searchsorted(cumulative, number, side="right")])] = 0.0
        return allowed


def _nucleus(logits: torch.Tensor, drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that top_p keeps, likeliest first, and their cumulative probabilities."""
    probabilities = torch.softmax(logits.double() / drawn.temperature, dim=-1)
    sorted_probabilities, ids = probabilities.sort(descending=True, stable=True)
    cumulative = sorted_probabilities.cumsum(-1)
    kept = int((cumulative - sorted_probabilities < drawn.top_p).sum())
    return ids[:kept].numpy(), cumulative[:kept].numpy()


def _number(drawn: Drawn, position: int) -> float:
    """The number that decides what stands at a position."""
    return float(uniform(np.array([drawn.seed], dtype=np.uint64), np.array([position], dtype=np.int32))[0])


def _distance(logits: torch.Tensor, drawn: Drawn, position: int, token: int) -> float:
    """How far the drawn number lies outside a token's share of the probability."""
    ids, cumulative = _nucleus(logits, drawn)
    place = np.flatnonzero(ids == token)
    if not len(place):
        # Only at the edge of what is kept may another computation keep one more.
        return float(max(drawn.top_p, 1.0 - _number(drawn, position)))
    number = _number(drawn, position) * cumulative[-1]
    start = cumulative[place[0] - 1] if place[0] else 0.0
    return float(max(start - number, number - cumulative[place[0]], 0.0))


def varied_prompts() -> list[str]:
    """Code, prose, lists, several scripts, emoji."""
    return [entry["text"] for entry in json.loads(PROMPTS.read_text(encoding="utf-8"))]


def trace_prompts(file: Path, count: int) -> list[str]:
    """The first prompts of a ShareGPT trace."""
    prompts: list[str] = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            prompts += [request["prompt"] for request in json.loads(line)["requests"]]
            if len(prompts) >= count:
                break
    return prompts[:count]
