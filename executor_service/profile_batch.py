"""The step that needs most memory within given limits, for the memory profile.

Station: called by `backends.torch_memory` while it measures. Its rows' block tables name a few scratch blocks over and
over, so contexts of full length need no cache of full size; the numbers computed are meaningless, their memory is real.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_service.backends.base import (
    GroupTables,
    LogitBias,
    PenaltyHistory,
    SamplingBatch,
    StepBatch,
    TokenSampling,
)
from executor_service.kernels.attention_plan import AttentionLimits

SCRATCH_BLOCKS = 4


def worst_batch(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    vocab_size: int,
    block_sizes: Sequence[int],
    max_logprobs: int,
    limits: AttentionLimits,
) -> StepBatch:
    """A step with the largest workspaces: all tokens, all rows, longest contexts, costliest sampling.

    All KV groups of one block size have the same tables: what is computed means nothing.

    Rows of full context are as many as fill one attention workspace; more would take longer and no more memory. The
    other tokens are rows that begin, the cheapest way to a full token count.
    """
    rows = _row_shapes(max_num_batched_tokens, max_num_seqs, max_model_len, limits)
    query_lens = np.array([query for query, _ in rows], dtype=np.int32)
    seq_lens = np.array([context for _, context in rows], dtype=np.int32)
    tables = {size: _scratch_tables(seq_lens, size) for size in block_sizes}
    positions = np.concatenate([np.arange(context - query, context, dtype=np.int32) for query, context in rows])
    slots = {}
    for size in tables:
        blocks = positions // size % (SCRATCH_BLOCKS - 1) + 1
        slots[size] = blocks.astype(np.int64) * size + positions % size
    return StepBatch(
        step_id=1,
        query_indptr=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        token_ids=(positions * 7919 % vocab_size).astype(np.int32),
        positions=positions,
        seq_lens=seq_lens,
        tables=[tables[size] for size in block_sizes],
        slot_mappings=[slots[size] for size in block_sizes],
        sampling=_worst_sampling(seq_lens, max_num_seqs, vocab_size, max_logprobs),
    )


def reserved_index_bytes(
    max_num_seqs: int, max_model_len: int, limits: AttentionLimits, windows: Sequence[int] = (0,)
) -> int:
    """What slot indices and masks of a step of decode rows may take at most, which `worst_batch` does not fill."""
    total = 0
    for window in windows:  # of each KV group, 0 for full attention
        elements = max_num_seqs * (min(abs(window), max_model_len) or max_model_len)
        total += min(elements, limits.index_elements) * 8 + elements
    return total


def _row_shapes(num_tokens: int, max_rows: int, max_model_len: int, limits: AttentionLimits) -> list[tuple[int, int]]:
    """(query tokens, context) of each row; at most `max_rows` rows of `num_tokens` tokens together."""
    max_rows = min(max_rows, num_tokens)
    chunk = min(limits.query_chunk(max_model_len), num_tokens - (max_rows - 1), max_model_len)
    rows = [(chunk, max_model_len)]
    left = num_tokens - chunk
    longest_prefill = min(max_model_len, left - max(0, max_rows - 2))
    if max_rows > 1 and longest_prefill > 1:
        rows.append((longest_prefill, longest_prefill))
        left -= longest_prefill
    decode = max_rows - len(rows)
    full = min(decode, limits.gather_tokens // max_model_len + 1)
    if left > full + (decode - full) * max_model_len:  # the other rows can not take the tokens that are left
        full = 0
    rows += [(1, max_model_len)] * full
    left -= full
    # What is left goes to the other rows evenly, one token at least each.
    for index in range(decode - full):
        share = min(max_model_len, left // (decode - full - index))
        rows.append((share, share))
        left -= share
    return rows


def _scratch_tables(seq_lens: np.ndarray[tuple[int, ...], np.dtype[np.int32]], block_size: int) -> GroupTables:
    """Tables of these lengths over blocks 1 to SCRATCH_BLOCKS - 1."""
    counts = -(-seq_lens // block_size)
    ids = np.concatenate([np.arange(count, dtype=np.int32) % (SCRATCH_BLOCKS - 1) + 1 for count in counts])
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return GroupTables(indptr, ids, (seq_lens - (counts - 1) * block_size).astype(np.int32))


def _worst_sampling(
    seq_lens: np.ndarray[tuple[int, ...], np.dtype[np.int32]], max_num_seqs: int, vocab_size: int, max_logprobs: int
) -> SamplingBatch:
    """Every row samples, with everything on, and a top_p that forces a sort of the whole vocabulary.

    There are as many samples as a step may have: rows that are forked sample more than once.
    """
    params = TokenSampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0 - 1e-7,
        min_p=1e-30,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=LogitBias.of({0: 1.0}),
        suppressed_token_ids=(min(1, vocab_size - 1),) if vocab_size > 1 else (),
        num_logprobs=min(max_logprobs, vocab_size),
    )
    rows = np.sort(np.arange(max_num_seqs, dtype=np.int32) % np.int32(len(seq_lens)))
    positions = seq_lens[rows]
    histories = {
        sample: PenaltyHistory((np.arange(length, dtype=np.int32) % vocab_size).astype(np.int32), 1)
        for sample, length in enumerate(positions)
    }
    return SamplingBatch(
        rows=rows,
        params=[params],
        params_index=np.zeros(max_num_seqs, dtype=np.int32),
        seeds=np.arange(max_num_seqs, dtype=np.uint64),
        positions=positions,
        histories=histories,
    )
