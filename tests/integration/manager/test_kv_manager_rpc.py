"""KvManagerService over a real connection."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as pb
from kvplane.kvmanager.v1.inference_service_pb2 import TokenIds

from kvmanager_service.core.block_history import BlockMoment, BlockRecord
from kvmanager_service.core.errors import PinLimitError
from kvmanager_service.core.extra_keys import LoraAdapter, request_keys
from kvmanager_service.core.request import FinishReason, RequestStatus
from kvmanager_service.engine_api import (
    BlockTrace,
    BlockView,
    EngineStats,
    ManagerState,
    PoolView,
    RequestView,
    TenantView,
)
from tests.integration.manager.fake_engine import Manager, details
from tests.unit.core.builders import token_bytes
from tests.unit.manager.manager_builders import model_view


def view(request_id: str, arrival: float, **changes: Any) -> RequestView:
    values: dict[str, Any] = {
        "status": RequestStatus.RUNNING,
        "priority": -1,
        "num_prompt_tokens": 2,
        "num_output_tokens": 3,
        "num_computed_tokens": 4,
        "num_cached_tokens": 1,
        "num_preemptions": 6,
        "block_table": [7, 8],
        "arrival_time": arrival,
        "age_seconds": 9.5,
        "tenant": "t",
    }
    return RequestView(request_id, **(values | changes))


async def test_get_stats_carries_every_field(manager: Manager) -> None:
    counters = {
        "requests_waiting": 1,
        "requests_running": 2,
        "requests_finished": {"stop": 3, "error": 4},
        "steps": 5,
        "steps_failed": 6,
        "tokens_computed": 7,
        "tokens_generated": 8,
        "preemptions": 9,
        "reschedules": 10,
        "prefix_queries": 11,
        "prefix_hits": 12,
        "blocks_evicted": 13,
        "swapped_out": 14,
        "swapped_in": 15,
    }
    pool = PoolView(
        block_size=16,
        num_blocks=20,
        free_blocks=15,
        cached_blocks=4,
        kv_epoch=2**63,
        num_host_blocks=40,
        used_host_blocks=3,
        pinned_blocks=5,
        group_block_sizes=[8, 16],
    )
    tenants = [TenantView("b", 1, 2, 3.5), TenantView("", 4, 5, 0.0)]
    manager.engine.stats_value = EngineStats(1.5, ManagerState.DRAINING, pool, **counters, tenants=tenants)  # type: ignore[arg-type]
    stats = await manager.kv.GetStats(pb.GetStatsRequest())
    assert {name: getattr(stats, name) for name in counters if name != "requests_finished"} == {
        name: value for name, value in counters.items() if name != "requests_finished"
    }
    assert dict(stats.requests_finished) == {"stop": 3, "error": 4}
    assert (stats.uptime_seconds, stats.state) == (1.5, pb.MANAGER_STATE_DRAINING)
    assert {name: getattr(stats.pool, name) for name in PoolView.__slots__} == {
        name: getattr(pool, name) for name in PoolView.__slots__
    }
    assert (stats.settings.policy, stats.settings.max_num_seqs, stats.settings.queue_ahead) == ("fcfs", 256, True)
    assert stats.settings.preemption_mode == "recompute"
    weights = (stats.settings.fair_input_weight, stats.settings.fair_output_weight, stats.settings.fair_cached_weight)
    assert weights == (1, 2, 0)
    assert list(stats.tenants) == [
        pb.TenantStats(tenant="b", requests_waiting=1, requests_running=2, served=3.5),
        pb.TenantStats(tenant="", requests_waiting=4, requests_running=5, served=0),
    ]


async def test_get_stats_before_an_executor_has_no_pool(manager: Manager) -> None:
    manager.engine.stats_value = EngineStats(0.5, ManagerState.NO_EXECUTOR)
    stats = await manager.kv.GetStats(pb.GetStatsRequest())
    assert (stats.state, stats.HasField("pool")) == (pb.MANAGER_STATE_NO_EXECUTOR, False)


async def test_list_requests_carries_every_field_and_finished_ones_on_demand(manager: Manager) -> None:
    manager.engine.request_views = [
        view("new", 2.0),
        view("old", 1.0, status=RequestStatus.FINISHED, finish_reason=FinishReason.LENGTH),
        view("bad", 0.5, status=RequestStatus.FINISHED, finish_reason=FinishReason.ERROR),
    ]
    (info,) = (await manager.kv.ListRequests(pb.ListRequestsRequest())).requests
    assert info == pb.RequestInfo(
        request_id="new",
        status=pb.REQUEST_STATUS_RUNNING,
        priority=-1,
        num_prompt_tokens=2,
        num_output_tokens=3,
        num_computed_tokens=4,
        num_cached_tokens=1,
        num_preemptions=6,
        block_table=[7, 8],
        age_seconds=9.5,
        tenant="t",
    )
    everyone = (await manager.kv.ListRequests(pb.ListRequestsRequest(include_finished=True))).requests
    assert [(entry.request_id, entry.finish_reason) for entry in everyone] == [
        ("bad", common_pb2.FINISH_REASON_UNSPECIFIED),
        ("old", common_pb2.FINISH_REASON_LENGTH),
        ("new", common_pb2.FINISH_REASON_UNSPECIFIED),
    ]
    selected = await manager.kv.ListRequests(pb.ListRequestsRequest(include_finished=True, request_id="old"))
    assert [entry.request_id for entry in selected.requests] == ["old"]


async def test_list_requests_pages_list_each_once_though_some_finish_in_between(manager: Manager) -> None:
    manager.engine.request_views = [view(f"r{index}", float(index // 2)) for index in range(10)]
    first = await manager.kv.ListRequests(pb.ListRequestsRequest(page_size=4))
    del manager.engine.request_views[1:5]
    manager.engine.request_views.append(view("later", 99.0))
    request = pb.ListRequestsRequest(page_size=4, page_token=first.next_page_token)
    second = await manager.kv.ListRequests(request)
    request.page_token = second.next_page_token
    third = await manager.kv.ListRequests(request)
    listed = [[entry.request_id for entry in page.requests] for page in (first, second, third)]
    assert listed == [["r0", "r1", "r2", "r3"], ["r5", "r6", "r7", "r8"], ["r9", "later"]]
    assert third.next_page_token == ""


async def test_trace_block_carries_every_field_and_every_moment(manager: Manager) -> None:
    records = [
        BlockRecord(7, 3, BlockMoment.ALLOCATED, request_id="r", step_id=0, block_hash=b""),
        BlockRecord(
            9,
            3,
            BlockMoment.FILLED,
            request_id="",
            step_id=5,
            block_hash=b"h",
            extra_keys=request_keys("s", "", LoraAdapter("a", "1")),
            group=2,
        ),
    ]
    manager.engine.trace = BlockTrace(records, 0, num_groups=3)
    response = await manager.kv.TraceBlock(pb.TraceBlockRequest(block_id=3))
    assert response == pb.TraceBlockResponse(
        records=[
            pb.BlockRecord(order=7, moment=pb.BLOCK_MOMENT_ALLOCATED, request_id="r"),
            pb.BlockRecord(
                order=9,
                moment=pb.BLOCK_MOMENT_FILLED,
                step_id=5,
                block_hash=b"h",
                group=2,
                keys=pb.KvBlockKeys(cache_salt="s", tenant="", lora_id="a", lora_revision="1"),
            ),
        ],
        is_whole=True,
        num_groups=3,
    )
    every = [
        BlockRecord(order, 3, moment, request_id="", step_id=0, block_hash=b"")
        for order, moment in enumerate(BlockMoment)
    ]
    manager.engine.trace = BlockTrace(every, 1)
    response = await manager.kv.TraceBlock(pb.TraceBlockRequest(block_id=3))
    assert [pb.BlockMoment.Name(one.moment) for one in response.records] == [
        f"BLOCK_MOMENT_{moment.name}" for moment in BlockMoment
    ]
    assert not response.is_whole


class LazyBlocks:
    """Blocks made when looked at; counts the looks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.looks = 0
        self.rare = 0  # the only block in use, or 0 for every other one

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> BlockView:
        self.looks += 1
        block_id = index + 1
        ref_cnt = int(block_id == self.rare) if self.rare else block_id % 2
        return BlockView(block_id, ref_cnt=ref_cnt, block_hash=b"h" * 16 if block_id % 3 == 0 else b"")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (pb.BLOCK_FILTER_UNSPECIFIED, list(range(1, 13))),
        (pb.BLOCK_FILTER_USED, [1, 3, 5, 7, 9, 11]),
        (pb.BLOCK_FILTER_FREE, [2, 4, 6, 8, 10, 12]),
        (pb.BLOCK_FILTER_CACHED, [3, 6, 9, 12]),
    ],
)
async def test_list_blocks_filters_and_pages(
    manager: Manager, chosen: pb.BlockFilter.ValueType, expected: list[int]
) -> None:
    manager.engine.block_views = LazyBlocks(12)  # type: ignore[assignment]
    request = pb.ListBlocksRequest(filter=chosen, page_size=3)
    listed: list[int] = []
    while True:
        page = await manager.kv.ListBlocks(request)
        assert 1 <= len(page.blocks) <= 3
        listed += [block.block_id for block in page.blocks]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert listed == expected


async def test_list_blocks_page_of_a_large_pool_looks_at_no_other_block(manager: Manager) -> None:
    blocks = LazyBlocks(1_000_000)
    manager.engine.block_views = blocks  # type: ignore[assignment]
    page = await manager.kv.ListBlocks(pb.ListBlocksRequest(page_token="500000"))
    assert (page.blocks[0].block_id, len(page.blocks), page.next_page_token) == (500_001, 1_000, "501000")
    assert blocks.looks == 1_001


async def test_list_blocks_filter_that_selects_few_of_a_large_pool_looks_at_a_part_of_it_a_page(
    manager: Manager,
) -> None:
    blocks = LazyBlocks(25_000)
    manager.engine.block_views = blocks  # type: ignore[assignment]
    blocks.rare = 20_001
    request = pb.ListBlocksRequest(filter=pb.BLOCK_FILTER_USED)
    listed = []
    for token in ("10000", "20000", ""):
        page = await manager.kv.ListBlocks(request)
        listed.append([block.block_id for block in page.blocks])
        assert (blocks.looks, page.next_page_token) == (min(10_000, blocks.looks), token)
        request.page_token, blocks.looks = page.next_page_token, 0
    assert listed == [[], [], [20_001]]


async def test_list_blocks_shows_hash_and_provisional(manager: Manager) -> None:
    manager.engine.block_views = [BlockView(1, 2, b"0123456789abcdef", provisional=True)]
    (block,) = (await manager.kv.ListBlocks(pb.ListBlocksRequest())).blocks
    assert block == pb.BlockInfo(block_id=1, ref_cnt=2, block_hash=b"0123456789abcdef", provisional=True)


@pytest.mark.parametrize("changes", [{"page_size": -1}, {"page_size": 10_001}, {"page_token": "x"}])
async def test_list_blocks_bad_page_is_invalid_argument(manager: Manager, changes: dict[str, Any]) -> None:
    manager.engine.block_views = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.ListBlocks(pb.ListBlocksRequest(**changes))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("changes", [{"page_size": -1}, {"page_size": 1_001}, {"page_token": "x"}])
async def test_list_requests_bad_page_is_invalid_argument(manager: Manager, changes: dict[str, Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.ListRequests(pb.ListRequestsRequest(**changes))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reset_prefix_cache_tells_how_many(manager: Manager) -> None:
    assert (await manager.kv.ResetPrefixCache(pb.ResetPrefixCacheRequest())).blocks_forgotten == 7


async def test_pin_prefix_of_token_ids_text_and_salt_arrives_and_is_listed(manager: Manager) -> None:
    by_ids = pb.PinPrefixRequest(name="ids", token_ids=TokenIds(ids=[5, 6, 7]), cache_salt="s", tenant="t")
    by_text = pb.PinPrefixRequest(name="text", text="hello")
    first = await manager.kv.PinPrefix(by_ids)
    await manager.kv.PinPrefix(by_text)
    salted = pb.KvBlockKeys(cache_salt="s")
    assert first.pin == pb.PinnedPrefix(name="ids", num_tokens=3, num_blocks=4, held_blocks=3, keys=salted)
    pinned = manager.engine.pinned
    assert pinned["ids"].token_bytes == token_bytes([5, 6, 7])
    assert pinned["ids"].extra_keys == request_keys("s", None, None), "a tenant counts only where tenants are isolated"
    assert manager.engine.model_view is not None
    text = manager.engine.model_view.text
    assert text is not None
    assert pinned["text"].token_bytes == (await text.encode_text("hello", 128)).tobytes()
    listed = await manager.kv.ListPinnedPrefixes(pb.ListPinnedPrefixesRequest())
    assert (listed.max_blocks, [pin.name for pin in listed.pins]) == (20, ["ids", "text"])
    assert (listed.pins[1].num_blocks, listed.pins[1].held_blocks) == (8, 7)
    assert (listed.pins[0].keys, listed.pins[1].HasField("keys")) == (salted, False)


async def test_pin_prefix_of_an_adapter_is_of_its_present_weights(manager: Manager) -> None:
    wanted = pb.PinPrefixRequest(name="a", token_ids=TokenIds(ids=[5]), cache_salt="s", adapter="support")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.PinPrefix(wanted)
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER")
    assert manager.engine.pinned == {}
    await manager.kv.LoadAdapter(pb.LoadAdapterRequest(name="support", source="/lora"))
    await manager.kv.PinPrefix(wanted)
    expected = request_keys("s", None, LoraAdapter("support", "revision of /lora"))
    assert manager.engine.pinned["a"].extra_keys == expected
    (listed,) = (await manager.kv.ListPinnedPrefixes(pb.ListPinnedPrefixesRequest())).pins
    assert listed.keys == pb.KvBlockKeys(cache_salt="s", lora_id="support", lora_revision="revision of /lora")


async def test_unpin_prefix_lets_go_and_a_name_without_a_pin_is_not_found(manager: Manager) -> None:
    await manager.kv.PinPrefix(pb.PinPrefixRequest(name="ids", token_ids=TokenIds(ids=[5])))
    await manager.kv.UnpinPrefix(pb.UnpinPrefixRequest(name="ids"))
    assert manager.engine.pinned == {}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.UnpinPrefix(pb.UnpinPrefixRequest(name="ids"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 257}, "name"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"tenant": "x" * 257}, "tenant"),
        ({"adapter": "x" * 257}, "adapter"),
        ({"token_ids": TokenIds(ids=[610])}, "prefix"),
        ({"token_ids": TokenIds(ids=[-1])}, "prefix"),
        ({"token_ids": TokenIds()}, "prefix"),
        ({"token_ids": TokenIds(ids=[1] * 128)}, "prefix"),
        ({"token_ids": None}, "prefix"),
    ],
)
async def test_pin_prefix_bad_field_is_invalid_argument(manager: Manager, changes: dict[str, Any], field: str) -> None:
    request = pb.PinPrefixRequest(**({"name": "a", "token_ids": TokenIds(ids=[5])} | changes))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.PinPrefix(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}: expected")
    assert manager.engine.pinned == {}


async def test_unpin_prefix_name_too_long_to_be_repeated_is_invalid_argument(manager: Manager) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.UnpinPrefix(pb.UnpinPrefixRequest(name="x" * 257))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_pin_prefix_text_without_a_tokenizer_is_a_failed_precondition(manager: Manager) -> None:
    manager.engine.model_view = model_view(None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.PinPrefix(pb.PinPrefixRequest(name="a", text="hello"))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_pin_prefix_refused_by_the_engine_says_why(manager: Manager) -> None:
    manager.engine.refuse = PinLimitError("PIN_LIMIT", "expected fewer blocks", limit=3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.PinPrefix(pb.PinPrefixRequest(name="a", token_ids=TokenIds(ids=[5])))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "expected fewer blocks"
