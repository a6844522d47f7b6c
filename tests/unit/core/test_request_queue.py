import random

import pytest

from kvmanager_service.core.fair_queue import DEFAULT_WEIGHTS
from kvmanager_service.core.policies import POLICIES, make_queue
from kvmanager_service.core.request import Request
from kvmanager_service.core.request_queue import FCFSQueue, PriorityQueue, RequestQueue
from tests.unit.core.builders import make_request


def make(name: str, seq: int, priority: int = 0) -> Request:
    return make_request(name, priority=priority, arrival_seq=seq)


def ids(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def drain(queue: RequestQueue) -> list[str]:
    order = []
    while len(queue):
        order.append(queue.peek().request_id)
        queue.remove(queue.peek())
    return order


def test_fcfs_queue_new_requests_wait_in_order_of_arrival() -> None:
    queue = FCFSQueue()
    for seq, name in enumerate("abc"):
        queue.add(make(name, seq, priority=-seq))
    assert ids(queue) == ["a", "b", "c"]
    assert drain(queue) == ["a", "b", "c"]


def test_fcfs_queue_preempted_requests_go_before_those_that_never_ran() -> None:
    queue = FCFSQueue()
    queue.add(make("new", 9))
    for seq, name in ((3, "c"), (2, "b"), (1, "a")):  # as victims are chosen: the latest first
        queue.requeue(make(name, seq))
    assert ids(queue) == ["a", "b", "c", "new"]


@pytest.mark.parametrize("seed", range(20))
def test_fcfs_queue_preempted_requests_stand_by_arrival_however_they_come_back_and_leave(seed: int) -> None:
    """Against a list that is sorted anew each time."""
    rng = random.Random(seed)
    queue, expected = FCFSQueue(), list[tuple[bool, int, Request]]()
    for seq in range(60):
        request = make(f"r{seq}", seq if rng.random() < 0.5 else -rng.randrange(1_000_000))
        if request.arrival_seq == seq:
            queue.add(request)
        else:
            queue.requeue(request)
        expected.append((request.arrival_seq == seq, request.arrival_seq, request))
        expected.sort(key=lambda entry: entry[:2])
        if rng.random() < 0.4:
            place = rng.choice((0, rng.randrange(len(expected))))
            queue.remove(expected.pop(place)[2])
        assert list(queue) == [entry[2] for entry in expected]
        assert len(queue) == len(expected)
        assert not expected or queue.peek() is expected[0][2]


def test_fcfs_victims_latest_arrival_comes_first_wherever_it_runs() -> None:
    running = [make("b", 2), make("c", 3), make("a", 1)]
    assert [request.request_id for request in FCFSQueue().victims(running)] == ["c", "b", "a"]


def test_priority_queue_lowest_value_then_earliest_arrival_comes_first() -> None:
    queue = PriorityQueue()
    for name, seq, priority in (("late", 5, 0), ("low", 1, 7), ("early", 2, 0), ("urgent", 9, -1)):
        queue.add(make(name, seq, priority))
    assert ids(queue) == ["urgent", "early", "late", "low"]
    assert drain(queue) == ["urgent", "early", "late", "low"]


def test_priority_queue_preempted_request_keeps_its_place_by_arrival() -> None:
    queue = PriorityQueue()
    queue.add(make("urgent", 5, -1))
    queue.add(make("new", 4))
    queue.requeue(make("old", 1))
    assert drain(queue) == ["urgent", "old", "new"]


def test_priority_victims_highest_value_then_latest_arrival_comes_first() -> None:
    running = [make("urgent", 9, -1), make("old", 1, 3), make("new", 2, 3), make("normal", 0)]
    assert [request.request_id for request in PriorityQueue().victims(running)] == ["new", "old", "normal", "urgent"]


def test_priority_queue_id_used_again_is_the_new_request() -> None:
    queue = PriorityQueue()
    old, other, new = make("a", 1, -5), make("b", 2), make("a", 3, 5)
    queue.add(old)
    queue.remove(old)
    queue.add(other)
    queue.add(new)
    assert queue.peek() is other
    queue.remove(other)
    assert queue.peek() is new


def test_priority_queue_many_removed_does_not_keep_them() -> None:
    queue = PriorityQueue()
    kept = make("kept", 10_000, 9)
    queue.add(kept)
    for seq in range(1000):
        request = make(f"r{seq}", seq)
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 200
    assert queue.peek() is kept
    assert len(queue) == 1


def test_priority_queue_ten_thousand_waiting_cost_few_comparisons_each() -> None:
    """Add, peek and remove are O(log n) each, wherever the request stands: 2 log2 n tuples are compared at most."""
    compared = 0

    class Priority(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

    queue = PriorityQueue()
    requests = [make(f"r{seq}", seq, Priority(seq * 7919 % 10_000)) for seq in range(10_000)]
    for request in requests:
        queue.add(request)
    assert compared <= 10_000 * 14
    compared = 0
    for request in requests[:1000]:
        queue.remove(request)
        queue.peek()
    assert compared <= 1000 * 2 * 14


@pytest.mark.parametrize("policy", POLICIES)
def test_queue_remove_from_the_middle_keeps_the_order_of_the_others(policy: str) -> None:
    queue = make_queue(policy, DEFAULT_WEIGHTS)
    requests = [make(name, seq) for seq, name in enumerate("abcd")]
    for request in requests:
        queue.add(request)
    queue.remove(requests[1])
    queue.remove(requests[0])
    queue.requeue(requests[0])
    assert drain(queue) == ["a", "c", "d"]
