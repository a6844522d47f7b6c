"""What is measured: shapes, and the bytes and operations that each needs at least. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """Geometry of one attention layer; by default that of an 8-billion-parameter Llama 3."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of K and V of so many tokens."""
        return 2 * tokens * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class Step:
    """Rows of one shape. Units: query, context: tokens; context includes the query's own."""

    rows: int
    query: int
    context: int

    @property
    def name(self) -> str:
        """As the report shows it."""
        return f"{self.rows} x {self.context}" if self.query == 1 else f"{self.rows} x {self.query} of {self.context}"

    def kv_bytes(self, heads: Heads, itemsize: int) -> int:
        """Bytes of K and V that attention must read: all of each row, once."""
        return heads.kv_bytes(self.rows * self.context, itemsize)

    def flops(self, heads: Heads) -> int:
        """Operations of causal attention: two products of head_dim, of two operations each, for every pair seen."""
        before = self.context - self.query
        pairs = self.query * before + self.query * (self.query + 1) // 2
        return 4 * self.rows * pairs * heads.num_heads * heads.head_dim


def decode_steps(heads: Heads, itemsize: int, free_bytes: int) -> Iterator[Step]:
    """1 to 256 sequences of 1 to 32 k tokens, those whose K/V fits three times: in blocks, flat, and to spare."""
    for context in (1024, 4096, 8192, 32768):
        for rows in (1, 8, 32, 64, 256):
            step = Step(rows, 1, context)
            if 3 * step.kv_bytes(heads, itemsize) <= free_bytes:
                yield step


def prefill_steps(heads: Heads, itemsize: int, free_bytes: int) -> Iterator[Step]:
    """Whole prompts, many at once and one alone, and chunks behind a long prefix, likewise those that fit."""
    for rows, query, context in (
        (8, 512, 512),
        (4, 2048, 2048),
        (1, 8192, 8192),
        (1, 2048, 16384),
        (8, 512, 8192),
        (1, 32768, 32768),
    ):
        step = Step(rows, query, context)
        if 3 * step.kv_bytes(heads, itemsize) <= free_bytes:
            yield step
