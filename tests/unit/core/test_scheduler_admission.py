"""Who is accepted, who is admitted when, and how much of each is computed."""

import pytest

from kvmanager_service.core.content_lookup import ContentLookup
from kvmanager_service.core.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from kvmanager_service.core.request import FinishReason, RequestStatus
from kvmanager_service.core.scheduler_config import SchedulerConfig
from tests.unit.core.builders import (
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    outputs_of,
    rows_of,
    run_step,
    state_of,
)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"policy": "lifo"}, "policy to be one of fcfs, priority, fair, got 'lifo'"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens of at least 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs of at least 1, got 0"),
        ({"max_waiting": 0}, "max_waiting of at least 1, got 0"),
        ({"max_outstanding": 0}, "max_outstanding of 1 or 2, got 0"),
        ({"max_outstanding": 3}, "max_outstanding of 1 or 2, got 3"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold of at least 0, got -1"),
        ({"watermark": 1.0}, r"watermark in \[0, 1\), got 1.0"),
        ({"watermark": -0.1}, r"watermark in \[0, 1\), got -0.1"),
    ],
)
def test_config_value_out_of_range_raises(limits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**limits)


def test_add_request_id_in_use_refuses_that_caller_only() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 4))
    run_step(scheduler)
    scheduler.add_request(make_new("b", 4))
    before = state_of(scheduler)
    for request_id in ("a", "b"):  # one runs, one waits
        with pytest.raises(DuplicateRequestError, match="request_id that is not in use"):
            scheduler.add_request(make_new(request_id, 3))
    assert state_of(scheduler) == before
    assert set(rows_of(run_step(scheduler))) == {"a", "b"}


def test_add_request_id_of_an_ended_request_is_free_again() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    old = scheduler.add_request(make_new("a", 4))
    late = scheduler.schedule()
    assert late is not None
    scheduler.abort("a")
    new = scheduler.add_request(make_new("a", 4))
    scheduler.schedule()
    outputs_of(scheduler)
    scheduler.update(make_result(late, 99))
    assert scheduler.take_outputs() == [], "the late token is of the old request"
    assert old.num_output_tokens == new.num_output_tokens == 0
    assert old.status is RequestStatus.FINISHED


def test_add_request_queue_full_refuses_and_changes_nothing() -> None:
    scheduler = make_scheduler(max_waiting=2)
    scheduler.add_request(make_new("a", 4))
    scheduler.add_request(make_new("b", 4))
    before = state_of(scheduler)
    with pytest.raises(QueueFullError, match="at most 2 waiting requests, got 2 and 1 more"):
        scheduler.add_request(make_new("c", 4))
    assert state_of(scheduler) == before
    run_step(scheduler)
    scheduler.add_request(make_new("c", 4))


def test_add_request_preempted_requests_do_not_count_as_waiting() -> None:
    scheduler = make_scheduler(max_waiting=1)
    for request_id in "abc":
        scheduler.add_request(make_new(request_id, 4))
        run_step(scheduler)
    scheduler.lose_steps()
    assert len(scheduler.waiting) == 3
    scheduler.add_request(make_new("d", 4))
    with pytest.raises(QueueFullError):
        scheduler.add_request(make_new("e", 4))
    scheduler.abort("b")  # a preempted one that ends does not make room either
    with pytest.raises(QueueFullError):
        scheduler.add_request(make_new("e", 4))
    scheduler.check_integrity()


@pytest.mark.parametrize(("prompt", "fits"), [(39, True), (40, False), (41, False)])
def test_add_request_prompt_and_one_more_beyond_the_pool_is_refused_at_once(prompt: int, fits: bool) -> None:
    scheduler = make_scheduler(make_kv(num_blocks=11, block_size=4))
    scheduler.add_request(make_new("other", 4))
    run_step(scheduler)
    before = state_of(scheduler)
    if fits:
        scheduler.add_request(make_new("a", prompt))
        return
    with pytest.raises(InvalidRequestError, match="prompt of at most 39 tokens") as refused:
        scheduler.add_request(make_new("a", prompt))
    assert refused.value.reason == "PROMPT_TOO_LONG"
    assert refused.value.metadata == {"pool_tokens": "40", "prompt_tokens": str(prompt)}
    assert state_of(scheduler) == before
    assert rows_of(run_step(scheduler)) == {"other": (4, 1)}


def test_add_request_resumed_tokens_count_towards_the_pool() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=3, block_size=4))
    with pytest.raises(InvalidRequestError, match="got 8"):
        scheduler.add_request(make_new("a", 5, resumed=[1, 2, 3]))


def test_schedule_nothing_to_do_returns_none() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_schedule_fcfs_admits_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9)
    for request_id in "abc":
        scheduler.add_request(make_new(request_id, 4))
    assert rows_of(run_step(scheduler)) == {"a": (0, 4), "b": (0, 4), "c": (0, 1)}


def test_schedule_priority_admits_lowest_value_first() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=2)
    for request_id, priority in (("a", 1), ("b", 1), ("c", 0)):
        scheduler.add_request(make_new(request_id, 4, priority=priority))
    assert rows_of(run_step(scheduler)) == {"c": (0, 4), "a": (0, 4)}


def test_schedule_max_num_seqs_admits_no_more() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        scheduler.add_request(make_new(request_id, 4, max_tokens=2))
    assert set(rows_of(run_step(scheduler))) == {"a", "b"}
    assert set(rows_of(run_step(scheduler))) == {"a", "b"}
    assert set(rows_of(run_step(scheduler))) == {"c"}


def test_schedule_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    scheduler.add_request(make_new("a", 12))
    chunks = []
    for num_samples in (0, 0, 1, 1):
        step = run_step(scheduler)
        assert step.num_samples == num_samples
        assert step.num_tokens <= 5
        chunks.append(rows_of(step)["a"])
    assert chunks == [(0, 5), (5, 5), (10, 2), (12, 1)]
    assert [output.token_ids for output in scheduler.take_outputs()] == [[7], [7]]


def test_schedule_running_requests_come_before_admissions() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    scheduler.add_request(make_new("a", 4))
    run_step(scheduler)
    scheduler.add_request(make_new("b", 12))
    assert rows_of(run_step(scheduler)) == {"a": (4, 1), "b": (0, 4)}
    assert rows_of(run_step(scheduler)) == {"a": (5, 1), "b": (4, 4)}


def test_schedule_long_prefill_threshold_leaves_budget_for_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=4)
    scheduler.add_request(make_new("a", 9))
    scheduler.add_request(make_new("b", 5))
    assert rows_of(run_step(scheduler)) == {"a": (0, 4), "b": (0, 4)}
    assert rows_of(run_step(scheduler)) == {"a": (4, 4), "b": (4, 1)}
    assert rows_of(run_step(scheduler)) == {"a": (8, 1), "b": (5, 1)}


def test_schedule_watermark_keeps_blocks_free_while_others_run() -> None:
    kv = make_kv(num_blocks=11, block_size=4)
    scheduler = make_scheduler(kv, watermark=0.3)
    scheduler.add_request(make_new("a", 20))
    scheduler.add_request(make_new("b", 9))  # 3 blocks of 5 would leave 2 of the 3 kept free
    assert set(rows_of(run_step(scheduler))) == {"a"}
    scheduler.abort("a")
    assert set(rows_of(run_step(scheduler))) == {"b"}


def test_schedule_watermark_does_not_keep_out_a_lone_request() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=11, block_size=4), watermark=0.9)
    scheduler.add_request(make_new("a", 39))
    assert set(rows_of(run_step(scheduler))) == {"a"}


def test_schedule_admission_reserves_the_whole_known_sequence() -> None:
    kv = make_kv(num_blocks=11, block_size=4)
    scheduler = make_scheduler(kv, max_num_batched_tokens=4)
    request = scheduler.add_request(make_new("a", 30))
    run_step(scheduler)
    assert len(request.blocks) == 8
    assert request.num_computed_tokens == 4


def test_schedule_fully_cached_aligned_prompt_computes_the_last_block_only() -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    scheduler.add_request(make_new("a", prompt, max_tokens=1))
    run_step(scheduler)
    again = scheduler.add_request(make_new("b", prompt, max_tokens=1))
    step = run_step(scheduler)
    assert rows_of(step) == {"b": (8, 4)}
    assert step.num_samples == 1
    assert again.num_cached_tokens == 8
    assert (scheduler.stats.prefix_hits, scheduler.stats.prefix_queries) == (8, 24)


def test_schedule_caching_disabled_counts_no_query() -> None:
    scheduler = make_scheduler(make_kv(enable_caching=False))
    scheduler.add_request(make_new("a", 12))
    run_step(scheduler)
    assert (scheduler.stats.prefix_hits, scheduler.stats.prefix_queries) == (0, 0)


def test_schedule_same_prompt_in_one_step_is_shared_provisionally() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    prompt = list(range(9))
    first, second = (scheduler.add_request(make_new(request_id, prompt)) for request_id in "ab")
    step = scheduler.schedule()
    assert rows_of(step) == {"a": (0, 9), "b": (8, 1)}
    assert first.blocks[:2] == second.blocks[:2]
    assert all(block.provisional_step == step.step_id for block in first.blocks[:2])
    scheduler.update(make_result(step))
    assert all(block.provisional_step == 0 for block in first.blocks[:2])
    scheduler.check_integrity()


@pytest.mark.patches_core
@pytest.mark.parametrize("shared", ["nothing", "what others hold", "what nobody holds"])
def test_schedule_blocked_head_looks_nothing_up_until_blocks_come_free(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests decode, fill blocks and evict others all the time; none of that makes room for the head."""
    prompts = {"nothing": [], "what others hold": list(range(40)), "what nobody holds": list(range(5000, 5200))}
    scheduler = make_scheduler(make_kv(num_blocks=81, block_size=4))
    scheduler.add_request(make_new("gone", range(5000, 5200), max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(make_new("a", range(40), max_tokens=1000))
    scheduler.add_request(make_new("b", 20, max_tokens=1000))
    run_step(scheduler)
    own = range(9000, 9000 + 4 * 78 - len(prompts[shared]))
    head = scheduler.add_request(make_new("head", [*prompts[shared], *own]))

    lookups = 0
    original = ContentLookup.follow

    def follow(self: ContentLookup, *arguments: object) -> object:
        nonlocal lookups
        lookups += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ContentLookup, "follow", follow)
    for _ in range(100):
        assert set(rows_of(run_step(scheduler))) == {"a", "b"}
    assert scheduler.kv.pool.num_evictions > 0
    assert lookups == 0
    scheduler.abort("b")
    scheduler.abort("a")
    assert set(rows_of(run_step(scheduler))) == {"head"}
    assert 0 < lookups <= len(head.block_hashes)


def test_schedule_blocked_head_takes_a_hit_that_appears_as_soon_as_it_suffices() -> None:
    """Of 16 blocks 10 are another's who computes one in each step; the head needs 11, so it comes when 5 are hits."""
    scheduler = make_scheduler(make_kv(num_blocks=17, block_size=4), long_prefill_token_threshold=4)
    prompt = list(range(40))
    scheduler.add_request(make_new("a", prompt))
    scheduler.add_request(make_new("head", [*prompt, 99]))
    for index in range(4):
        assert rows_of(run_step(scheduler)) == {"a": (4 * index, 4)}
    assert rows_of(run_step(scheduler)) == {"a": (16, 4), "head": (20, 4)}


def test_schedule_hit_evicted_while_the_head_was_blocked_is_not_used() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=11, block_size=4))
    prompt = list(range(20))
    gone = scheduler.add_request(make_new("gone", prompt, max_tokens=1))
    step = scheduler.schedule()
    blocks = list(gone.blocks)
    scheduler.update(make_result(step))
    scheduler.add_request(make_new("a", 15, max_tokens=11))
    head = scheduler.add_request(make_new("head", [*prompt, *range(90, 98)]))
    assert len(scheduler.kv.get_computed_blocks(head)) == 5
    while "a" in scheduler.requests:
        assert set(rows_of(run_step(scheduler))) == {"a"}
    assert scheduler.kv.pool.num_evictions == 2, "a took two of the blocks that the head would have found"
    assert rows_of(run_step(scheduler)) == {"head": (12, 16)}
    assert head.blocks[:3] == blocks[:3]


def test_schedule_different_salts_in_one_step_share_nothing() -> None:
    scheduler = make_scheduler()
    prompt = list(range(9))
    for request_id in "ab":
        scheduler.add_request(make_new(request_id, prompt, salt=request_id))
    assert rows_of(run_step(scheduler)) == {"a": (0, 9), "b": (0, 9)}


def test_schedule_as_many_steps_as_may_be_out_then_returns_none() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    scheduler.add_request(make_new("a", 4))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert [step.step_id for step in steps if step] == [1, 2]
    assert scheduler.schedule() is None
    scheduler.update(make_result(steps[0]))
    assert scheduler.schedule() is not None


def test_abort_waiting_request_ends_it_without_a_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 4))
    scheduler.abort("a")
    output = outputs_of(scheduler)["a"]
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.ABORT)
    assert not scheduler.has_work
    assert scheduler.schedule() is None


def test_requests_whatever_became_of_them_stay_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id in "abc":
        scheduler.add_request(make_new(request_id, 4))
    run_step(scheduler)
    scheduler.lose_steps()
    run_step(scheduler)
    assert list(scheduler.requests) == ["a", "b", "c"]
