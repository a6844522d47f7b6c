"""Which executors will do."""

from __future__ import annotations

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

SERVED = ModelView("tiny", "f1", 128, 600, (0,), 0, "float32")


def ready(
    max_model_len: int = 128, num_blocks: int = 65, block_size: int = 4, groups: int = 1, num_host_blocks: int = 0
) -> ReadyExecutor:
    info = pb.GetModelInfoResponse(
        model_name="tiny",
        model_fingerprint="f1",
        max_model_len=max_model_len,
        kv_groups=[pb.KvGroup(type=pb.KV_GROUP_TYPE_FULL_ATTENTION)] * groups,
    )
    kv_cache = pb.KvCacheState(
        kv_epoch=1, num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks
    )
    return ReadyExecutor(info, kv_cache, [])


def test_executor_that_fits_passes_every_check() -> None:
    for served in (None, SERVED):
        require_model(served, ready().info)
        require_geometry(ready())
        require_length(served, ready())


def test_executor_of_other_weights_is_a_mismatch() -> None:
    other = pb.GetModelInfoResponse(model_name="big", model_fingerprint="f2", kv_cache_dtype="fp8_e4m3")
    said = r"serves 'tiny' \(f1\), got other weights, or K/V quantised otherwise: 'big' \(f2, fp8_e4m3\)"
    with pytest.raises(ExecutorUnfitError, match=said) as caught:
        require_model(SERVED, other)
    assert caught.value.reason == "MODEL_MISMATCH"


@pytest.mark.parametrize(
    "changes", [{"groups": 0}, {"groups": 2}, {"block_size": 0}, {"num_blocks": 1}, {"num_host_blocks": -1}]
)
def test_executor_of_a_cache_without_books_is_of_unsupported_geometry(changes: dict[str, int]) -> None:
    with pytest.raises(ExecutorUnfitError, match="kv_cache: expected one group") as caught:
        require_geometry(ready(**changes))
    assert caught.value.reason == "KV_GEOMETRY_UNSUPPORTED"


def test_executor_that_computes_less_than_was_admitted_is_too_short() -> None:
    with pytest.raises(ExecutorUnfitError, match=r"expected at least 128, .* got 127") as caught:
        require_length(SERVED, ready(max_model_len=127))
    assert caught.value.reason == "MODEL_LEN_TOO_SHORT"


def test_executor_of_a_small_pool_need_compute_no_more_than_fits() -> None:
    require_length(SERVED, ready(max_model_len=40, num_blocks=11))
    with pytest.raises(ExecutorUnfitError, match=r"expected at least 40, .* got 39"):
        require_length(SERVED, ready(max_model_len=39, num_blocks=11))


async def test_executor_whose_tokenizer_is_none_is_unreadable() -> None:
    files = [pb.TokenizerFile(name="tokenizer.json", content=b"{")]
    with pytest.raises(ExecutorUnfitError, match="tokenizer_files: expected") as caught:
        await load_model(pb.GetModelInfoResponse(tokenizer_files=files))
    assert caught.value.reason == "TOKENIZER_UNREADABLE"
