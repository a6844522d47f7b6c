"""What a case has given out and seen so far.

Station: made by `bench` for each case; its streams write into it.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from kvplane_client.conformance.judges import Output, Question
from kvplane_client.conformance.steps import Row, Sample, greedy
from kvplane_client.conformance.target import Target

__all__ = ["Notebook"]

_NUM_LOGPROBS = 5


class Notebook:
    """One case's notes.

    Args:
        target: The executor.
        kv_epoch: Of the empty cache.

    Attributes:
        epoch: Of the cache by now.
        greedy: How rows sample that do not say; their outputs are noted.
        noted: Every such output, with what it answers.
    """

    def __init__(self, target: Target, kv_epoch: int) -> None:
        self.target = target
        self.epoch = kv_epoch
        self.greedy = Sample(greedy(min(_NUM_LOGPROBS, target.info.max_logprobs)))
        self.noted: list[tuple[Question, Output]] = []
        self._unused = list(range(target.geometry.num_blocks))
        random.Random(7).shuffle(self._unused)  # noqa: S311 - the same order everywhere

    def blocks(self, count: int) -> list[int]:
        """Logical blocks that no other call has given out, in no order."""
        taken, self._unused = self._unused[:count], self._unused[count:]
        assert len(taken) == count, "a case wants more blocks than there are"
        return taken

    def take(self, blocks: Collection[int]) -> None:
        """Gives these out to nobody else."""
        self._unused = [block for block in self._unused if block not in blocks]

    def note(self, row: Row, output: Output) -> None:
        """Keeps an output for the judge."""
        self.noted.append((Question(tuple(row.track.tokens[: row.end]), row.track.adapter), output))
