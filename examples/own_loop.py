"""An engine with its own loop on KVPlane's block tables: transformers computes, the manager keeps the books.

The process holds the weights and the paged K/V; the manager, over gRPC, says which block each token goes to, what of a
prompt is there already, what to copy when branches part, and who should give way when blocks run short. Every output
is compared with what transformers' own `generate` makes of the prompt.

    kvplane up --backend sim &
    python examples/own_loop.py --model ~/.cache/kvplane/models/SmolLM2-135M-Instruct.Q4_1.gguf

Needs the `executor` extra (torch, transformers). The manager needs no executor for this, and no model.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from kvplane_client import (
    BlockShortage,
    Client,
    CloseSequence,
    CommitSequence,
    ExtendSequence,
    ForkSequence,
    KvPlaneError,
    OpenSequence,
    SequenceOperation,
    SequenceResult,
    SequenceTable,
    SyncSequencePool,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

PREAMBLE = (
    "You are the librarian of a small town. People ask you about books, places and history, and you answer in one "
    "short, friendly sentence. When you do not know, you say so.\n\n"
)
QUESTIONS = ("Question: What is the capital of France?\nAnswer:", "Question: Who wrote Hamlet?\nAnswer:")


@dataclass
class Running:
    """A sequence that this engine computes.

    Attributes:
        tokens: prompt and output.
        table: its blocks, as the manager said last.
        computed: how many of its tokens have K/V in them.
        was_preempted: whether it had to give way, and is opened again.
    """

    name: str
    tokens: list[int]
    num_prompt_tokens: int
    limit: int
    table: Sequence[int] = ()
    computed: int = 0
    was_preempted: bool = False
    cached: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.tokens) >= self.limit


class PagedMemory:
    """The physical K/V. Shape: keys and values are (layers, num_blocks * block_size, kv_heads, head_dim)."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_blocks * block_size, config.num_key_value_heads, head_dim)
        self.block_size = block_size
        self.keys = torch.zeros(shape, dtype=model.dtype)
        self.values = torch.zeros(shape, dtype=model.dtype)

    def slots(self, table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Where the tokens [start, stop) of a sequence with this table lie."""
        positions = torch.arange(start, stop)
        return torch.tensor(table)[positions // self.block_size] * self.block_size + positions % self.block_size

    def copy(self, source: int, target: int) -> None:
        """Copy a block in all layers."""
        for memory in (self.keys, self.values):
            blocks = memory.view(memory.shape[0], -1, self.block_size, *memory.shape[2:])
            blocks[:, target] = blocks[:, source]

    def read(self, slots: torch.Tensor) -> DynamicCache:
        """What transformers is to attend to."""
        cache = DynamicCache()
        for layer in range(len(self.keys)):
            keys, values = (memory[layer, slots].transpose(0, 1)[None] for memory in (self.keys, self.values))
            cache.update(keys, values, layer)
        return cache

    def write(self, slots: torch.Tensor, cache: DynamicCache) -> None:
        """Keep the newest tokens of a cache."""
        for layer, held in enumerate(cache.layers):
            self.keys[layer, slots] = held.keys[0, :, -len(slots) :].transpose(0, 1)
            self.values[layer, slots] = held.values[0, :, -len(slots) :].transpose(0, 1)


class Engine:
    """A loop of its own: one token of every running sequence a step, one batch of operations to the manager a step."""

    def __init__(self, model: PreTrainedModel, pool: SyncSequencePool) -> None:
        self.model = model
        self.pool = pool
        # What older versions of transformers call it.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.memory = PagedMemory(model, pool.info.num_blocks, pool.info.block_size)
        self.running: dict[str, Running] = {}
        self.waiting: deque[Running] = deque()
        self.finished: dict[str, Running] = {}
        self.num_computed = self.num_preempted = self.num_advised = self.num_copies = 0

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a prompt."""
        self.waiting.append(Running(name, list(prompt), len(prompt), len(prompt) + max_tokens))

    def run(self) -> None:
        """Work until everything queued has finished."""
        while self.running or self.waiting:
            self.admit()
            self.step()

    def admit(self) -> None:
        """Open what waits, as long as there are blocks."""
        while self.waiting:
            sequence = self.waiting[0]
            operation = OpenSequence(sequence.name, sequence.tokens, is_resumed=sequence.was_preempted)
            (result,) = self._update([operation])
            if isinstance(result, BlockShortage):
                if not self.running:
                    raise RuntimeError(f"{sequence.name} needs {result.needed_blocks} blocks: the pool is too small")
                return
            assert isinstance(result, SequenceTable)
            sequence.table, sequence.computed = result.block_ids, result.num_computed_tokens
            sequence.cached.append(result.num_computed_tokens)
            self.running[sequence.name] = self.waiting.popleft()

    def step(self) -> None:
        """Compute what is new of every sequence and take its likeliest next token; tell the manager all at once."""
        for sequence in self.running.values():
            sequence.tokens.append(int(self.compute(sequence).argmax()))
        done = [sequence for sequence in self.running.values() if sequence.is_done]
        growing = [sequence for sequence in self.running.values() if not sequence.is_done]
        operations: list[SequenceOperation] = []
        for sequence in done:
            operations += [CommitSequence(sequence.name, sequence.computed), CloseSequence(sequence.name)]
        for sequence in growing:
            operations.append(
                ExtendSequence(sequence.name, sequence.tokens[-1:], num_computed_tokens=sequence.computed)
            )
        results = self._update(operations)
        for sequence in done:
            self.finished[sequence.name] = self.running.pop(sequence.name)
        for sequence, result in zip(growing, results[len(operations) - len(growing) :], strict=True):
            self._take(sequence, result)

    def fork(self, name: str, new_name: str) -> None:
        """Branch a running sequence where it stands; the manager copies blocks when the branches part."""
        parent = self.running[name]
        (result,) = self._update([ForkSequence(name, new_name)])
        assert isinstance(result, SequenceTable)
        branch = Running(new_name, list(parent.tokens), parent.num_prompt_tokens, parent.limit)
        branch.table, branch.computed = result.block_ids, result.num_computed_tokens
        self.running[new_name] = branch

    def choose(self, name: str, token: int) -> None:
        """Go on with a token of the caller's choice."""
        sequence = self.running[name]
        sequence.tokens.append(token)
        self._take(sequence, *self._update([ExtendSequence(name, [token])]))

    def compute(self, sequence: Running) -> torch.Tensor:
        """Compute the tokens that have no K/V yet. Returns the logits after the last. Shape: (vocab_size,)."""
        start, stop = sequence.computed, len(sequence.tokens)
        cache = self.memory.read(self.memory.slots(sequence.table, 0, start)) if start else DynamicCache()
        with torch.inference_mode():
            inputs = {self._cache_argument: cache, "logits_to_keep": 1}
            logits = self.model(torch.tensor([sequence.tokens[start:]]), **inputs).logits
        self.memory.write(self.memory.slots(sequence.table, start, stop), cache)
        self.num_computed += stop - start
        sequence.computed = stop
        return logits[0, -1]

    def commit(self, name: str) -> None:
        """Tell the manager what was computed of a sequence."""
        self._update([CommitSequence(name, self.running[name].computed)])

    def _take(self, sequence: Running, result: SequenceResult) -> None:
        """Take the table that came back; when blocks run short, let those give way that the manager names."""
        while isinstance(result, BlockShortage) and sequence.name in self.running:
            self.num_advised += len(result.victim_ids)
            for name in result.victim_ids or (sequence.name,):
                self._preempt(self.running.pop(name))
            if sequence.name in self.running:
                (result,) = self._update([ExtendSequence(sequence.name, sequence.tokens[-1:])])
        if sequence.name not in self.running:
            return  # it gave way, now or to one before it
        assert isinstance(result, SequenceTable)
        sequence.table = result.block_ids
        for source, target in result.copies:
            self.memory.copy(source, target)
            self.num_copies += 1

    def _update(self, operations: list[SequenceOperation]) -> list[SequenceResult]:
        """Send a batch; an operation that was refused is a fault of this engine."""
        results = self.pool.update(operations)
        for result in results:
            if isinstance(result, KvPlaneError):
                raise result
        return results

    def _preempt(self, sequence: Running) -> None:
        self._update([CloseSequence(sequence.name)])
        sequence.table, sequence.computed, sequence.was_preempted = (), 0, True
        self.waiting.appendleft(sequence)
        self.num_preempted += 1


def main() -> int:
    """Run three demonstrations. Returns 0 when every output is that of `generate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="localhost:50051", help="the manager's address")
    parser.add_argument("--model", required=True, type=Path, help="a folder with weights, or a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder, gguf = (options.model, None) if options.model.is_dir() else (options.model.parent, options.model.name)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32).eval()
    prompts = [tokenizer(PREAMBLE + question).input_ids for question in QUESTIONS]
    expected = [_reference(model, prompt, options.max_tokens) for prompt in prompts]

    with Client(options.server) as client:
        with client.open_pool(num_blocks=64) as pool:
            print("1. two questions with one preamble: the second finds it computed")
            engine = Engine(model, pool)
            good = True
            for name, prompt, right in zip("ab", prompts, expected, strict=True):
                engine.add(name, prompt, options.max_tokens)
                engine.run()
                good &= _show(tokenizer, engine.finished[name], right)

            print("2. two branches of one sequence: blocks are shared until they part")
            engine.add("c", prompts[0], options.max_tokens)
            good &= _branches(tokenizer, model, engine, options.max_tokens)
            print(f"   {engine.num_copies} blocks copied")

        room = sum(-(-len(prompt) // 16) for prompt in prompts)
        with client.open_pool(num_blocks=1 + room, enable_prefix_caching=False) as pool:
            print(f"3. both at once in the {room} blocks of their prompts: one gives way, and comes back")
            engine = Engine(model, pool)
            for name, prompt in zip("ab", prompts, strict=True):
                engine.add(name, prompt, options.max_tokens)
            engine.run()
            for name, right in zip("ab", expected, strict=True):
                good &= _show(tokenizer, engine.finished[name], right)
            preempted = f"{engine.num_preempted} preemptions, {engine.num_advised} of them the manager's choice"
            print(f"   {preempted}; {engine.num_computed} tokens computed")
    print("every token is that of transformers' generate" if good else "SOME TOKENS DIFFER")
    return 0 if good else 1


def _branches(tokenizer: object, model: PreTrainedModel, engine: Engine, max_tokens: int) -> bool:
    """Branch after the prompt with the two likeliest tokens, as a beam search would begin."""
    engine.admit()
    sequence = engine.running["c"]
    prompt = list(sequence.tokens)
    likeliest = engine.compute(sequence).topk(2).indices.tolist()
    engine.commit("c")
    engine.fork("c", "d")
    for name, token in zip("cd", likeliest, strict=True):
        engine.choose(name, token)
    engine.run()
    good = True
    for name, token in zip("cd", likeliest, strict=True):
        right = [token, *_reference(model, [*prompt, token], max_tokens - 1)]
        good &= _show(tokenizer, engine.finished[name], right)
    return good


def _reference(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The next `count` tokens as transformers makes them by itself."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
    )
    return out[0, len(prompt) :].tolist()


def _show(tokenizer: object, sequence: Running, expected: list[int]) -> bool:
    got = sequence.tokens[sequence.num_prompt_tokens :]
    text = tokenizer.decode(got, skip_special_tokens=True)  # type: ignore[attr-defined]
    cached = f", {sequence.cached[-1]} of {sequence.num_prompt_tokens} prompt tokens cached" if sequence.cached else ""
    print(f"   {sequence.name}: {text.strip()!r}{cached}, {'exact' if got == expected else f'expected {expected}'}")
    return got == expected


if __name__ == "__main__":
    sys.exit(main())
