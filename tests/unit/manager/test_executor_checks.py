"""Which executors will do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.engine_api import ModelView
from kvmanager_service.executor_checks import (
    ExecutorUnfitError,
    load_model,
    require_geometry,
    require_length,
    require_model,
)
from kvmanager_service.executor_client import ReadyExecutor
from kvmanager_service.executor_groups import read_groups

SERVED = ModelView("tiny", "f1", 128, 600, (0,), 0, "float32")


STATE, CHUNKS = -1, -8
"""In place of a window."""


def kv_group(window: int) -> pb.KvGroup:
    if window == STATE:
        return pb.KvGroup(type=pb.KV_GROUP_TYPE_RECURRENT_STATE)
    if window == CHUNKS:
        return pb.KvGroup(type=pb.KV_GROUP_TYPE_CHUNKED_LOCAL, chunk=8)
    full, sliding = pb.KV_GROUP_TYPE_FULL_ATTENTION, pb.KV_GROUP_TYPE_SLIDING_WINDOW
    return pb.KvGroup(type=sliding if window else full, window=window)


def ready(
    max_model_len: int = 128,
    num_blocks: int = 65,
    block_size: int = 4,
    windows: tuple[int, ...] = (0,),
    num_host_blocks: int = 0,
) -> ReadyExecutor:
    info = pb.GetModelInfoResponse(
        model_name="tiny",
        model_fingerprint="f1",
        max_model_len=max_model_len,
        kv_groups=[kv_group(window) for window in windows],
    )
    kv_cache = pb.KvCacheState(
        kv_epoch=1, num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks
    )
    return ReadyExecutor(info, kv_cache, [])


def test_executor_that_fits_passes_every_check() -> None:
    for served in (None, SERVED):
        require_model(served, ready().info)
        require_geometry(ready())
        require_length(served, ready(), longest_chunk=16)


def test_executor_of_other_weights_is_a_mismatch() -> None:
    other = pb.GetModelInfoResponse(model_name="big", model_fingerprint="f2", kv_cache_dtype="fp8_e4m3")
    said = r"serves 'tiny' \(f1\), got other weights, or K/V quantised otherwise: 'big' \(f2, fp8_e4m3\)"
    with pytest.raises(ExecutorUnfitError, match=said) as caught:
        require_model(SERVED, other)
    assert caught.value.reason == "MODEL_MISMATCH"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": ()}, "kv_groups: expected 1 to 64 groups, got 0"),
        ({"windows": (0,) * 65}, "kv_groups: expected 1 to 64 groups, got 65"),
        ({"windows": (0, -3)}, "got group 1 of type 2 with window -3"),
        ({"windows": (0, 8, 8), "num_blocks": 3}, "kv_cache: expected num_blocks above the number of groups, 3"),
        ({"block_size": 0}, "kv_cache: expected block_size"),
        ({"num_blocks": 1}, "kv_cache: expected block_size"),
        ({"num_host_blocks": -1}, "kv_cache: expected block_size"),
    ],
)
def test_executor_of_a_cache_without_books_is_of_unsupported_geometry(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExecutorUnfitError, match=message) as caught:
        require_geometry(ready(**changes))
    assert caught.value.reason == "KV_GEOMETRY_UNSUPPORTED"


@pytest.mark.parametrize(
    "group",
    [
        pb.KvGroup(type=pb.KV_GROUP_TYPE_UNSPECIFIED),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_FULL_ATTENTION, window=8),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_SLIDING_WINDOW),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_RECURRENT_STATE, window=2),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_FULL_ATTENTION, chunk=8),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_SLIDING_WINDOW, window=8, chunk=8),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_RECURRENT_STATE, chunk=8),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_CHUNKED_LOCAL),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_CHUNKED_LOCAL, chunk=-8),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_CHUNKED_LOCAL, window=8),
        pb.KvGroup(type=pb.KV_GROUP_TYPE_CHUNKED_LOCAL, window=8, chunk=8),
        pb.KvGroup(type=77),  # type: ignore[arg-type]
    ],
)
def test_executor_with_a_group_of_unknown_type_is_of_unsupported_geometry(group: pb.KvGroup) -> None:
    executor = ready()
    executor.info.kv_groups.append(group)
    with pytest.raises(
        ExecutorUnfitError, match="expected full attention or a state without a window or a chunk, a sliding"
    ):
        require_geometry(executor)


def of_block_sizes(*sizes: int) -> ReadyExecutor:
    executor = ready(windows=(0,) * len(sizes))
    for group, size in zip(executor.info.kv_groups, sizes, strict=True):
        group.block_size = size
    return executor


def test_executor_whose_block_sizes_have_no_common_multiple_of_32_bits_is_of_unsupported_geometry() -> None:
    said = r"of at most 2147483647, got 16, 17, 19, 23, 29, 31, 37, whose least is 3953773232"
    with pytest.raises(ExecutorUnfitError, match=said) as caught:
        require_geometry(of_block_sizes(37, 16, 17, 19, 23, 29, 31))
    assert caught.value.reason == "KV_GEOMETRY_UNSUPPORTED"
    require_geometry(of_block_sizes(2**31 - 1, 2**31 - 1))
    with pytest.raises(ExecutorUnfitError, match="whose least is 4294967294"):
        require_geometry(of_block_sizes(2**31 - 1, 2))


@pytest.mark.parametrize("windows", [(0, 8), (8,), (0, 0), (0, STATE), (STATE,), (0, CHUNKS), (CHUNKS,)])
def test_executor_with_several_groups_or_a_window_will_do(windows: tuple[int, ...]) -> None:
    require_geometry(ready(windows=windows, num_host_blocks=8))


def test_executor_with_several_groups_is_measured_by_what_its_pool_holds_of_them() -> None:
    # 65 blocks of 4 tokens: a sequence of 400 tokens takes 100 of full attention, but 64 are usable. Of a window of 8
    # and chunks of 16 it takes at most 7 at a time, which leaves 57 blocks, 228 tokens, for full attention.
    with pytest.raises(ExecutorUnfitError, match=r"expected at least 228, .* got 227"):
        require_length(dataclasses.replace(SERVED, max_model_len=400), ready(227, windows=(0, 8)), longest_chunk=16)
    require_length(dataclasses.replace(SERVED, max_model_len=400), ready(228, windows=(0, 8)), longest_chunk=16)


def test_executor_that_computes_less_than_was_admitted_is_too_short() -> None:
    with pytest.raises(ExecutorUnfitError, match=r"expected at least 128, .* got 127") as caught:
        require_length(SERVED, ready(max_model_len=127), longest_chunk=16)
    assert caught.value.reason == "MODEL_LEN_TOO_SHORT"


def test_executor_of_a_small_pool_need_compute_no_more_than_fits() -> None:
    require_length(SERVED, ready(max_model_len=40, num_blocks=11), longest_chunk=16)
    with pytest.raises(ExecutorUnfitError, match=r"expected at least 40, .* got 39"):
        require_length(SERVED, ready(max_model_len=39, num_blocks=11), longest_chunk=16)


def test_executor_whose_groups_have_block_sizes_of_their_own_will_do_and_is_measured_by_them() -> None:
    executor = ready(max_model_len=300, windows=(0, 8, CHUNKS, STATE))
    for group, block_size in zip(executor.info.kv_groups, (0, 8, 16, 4), strict=True):
        group.block_size = block_size
    require_geometry(executor)
    groups = read_groups(executor.info.kv_groups, 4)
    assert [group.block_size for group in groups] == [4, 8, 16, 4]
    # Of 64 blocks a window of 8 takes at most 4, chunks of 8 3 and a state 5 at a time; 52 of 4 tokens are left.
    served = dataclasses.replace(SERVED, max_model_len=400)
    require_length(served, executor, longest_chunk=16)
    executor.info.max_model_len = 207
    with pytest.raises(ExecutorUnfitError, match=r"expected at least 208, .* got 207"):
        require_length(served, executor, longest_chunk=16)


def test_executor_with_a_group_of_negative_block_size_is_of_unsupported_geometry() -> None:
    executor = ready(windows=(0, 8))
    executor.info.kv_groups[1].block_size = -4
    with pytest.raises(
        ExecutorUnfitError, match=r"expected a block_size of at least 1 .* got group 1 with -4"
    ) as caught:
        require_geometry(executor)
    assert caught.value.reason == "KV_GEOMETRY_UNSUPPORTED"


async def test_executor_whose_tokenizer_is_none_is_unreadable() -> None:
    files = [pb.TokenizerFile(name="tokenizer.json", content=b"{")]
    with pytest.raises(ExecutorUnfitError, match="tokenizer_files: expected") as caught:
        await load_model(pb.GetModelInfoResponse(tokenizer_files=files))
    assert caught.value.reason == "TOKENIZER_UNREADABLE"
