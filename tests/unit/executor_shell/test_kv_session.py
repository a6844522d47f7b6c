"""What an executor keeps of profiles between managers."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from executor_service.backends.base import MemoryProfile
from executor_service.backends.sim_backend import SimBackend
from executor_service.errors import FailedPreconditionError
from executor_service.kv_session import KvSession
from tests.unit.executor_shell.executor_backends import HeldBackend
from tests.unit.executor_shell.executor_builders import sim_config


class Measuring(HeldBackend):
    """Notes what it measures, and finds a block less each time."""

    def __init__(self) -> None:
        super().__init__()
        self.open()
        self.measured: list[tuple[int, int]] = []

    def profile_memory(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        self.measured.append((max_num_batched_tokens, max_num_seqs))
        found = super().profile_memory(max_num_batched_tokens, max_num_seqs)
        return MemoryProfile(**(vars(found) | {"num_blocks": found.num_blocks - len(self.measured)}))


def test_profile_the_backend_measured_last_what_the_cache_is_made_for_and_the_answer_stays() -> None:
    backend = Measuring()
    session = KvSession(backend)
    session.load()
    first = session.profile(64, 4)
    assert session.profile(64, 4) == first
    other = session.profile(1, 1)
    assert session.profile(64, 4) == first != other
    assert backend.measured == [(64, 4), (1, 1), (64, 4)]


def test_profile_says_what_it_does_before_it_takes_its_time() -> None:
    session = KvSession(Measuring())
    session.load()
    with capture_logs() as logs:
        session.profile(64, 4)
        session.profile(64, 4)
    (event,) = [log for log in logs if log["event"] == "memory_profile_started"]
    assert (event["max_num_batched_tokens"], event["max_num_seqs"]) == (64, 4)


def test_settle_is_called_whenever_a_cache_has_been_made() -> None:
    settled: list[int] = []
    session = KvSession(HeldBackend().open(), settle=lambda: settled.append(len(settled)))
    session.load()
    session.profile(64, 4)
    assert settled == []
    cache = session.initialize(8)
    assert settled == [0]
    session.reset(cache.limits.kv_epoch)
    assert settled == [0, 1]


def test_manager_that_takes_all_blocks_for_equal_is_refused_where_a_group_has_its_own() -> None:
    def session_of(*sizes: int) -> KvSession:
        session = KvSession(SimBackend(sim_config(sim_windows=(0,) * len(sizes), sim_block_sizes=sizes)))
        session.load()
        return session

    said = r"knows_group_block_sizes: expected .* which are 4, 8 here, got one .*; upgrade the manager"
    with pytest.raises(FailedPreconditionError, match=said) as caught:
        session_of(4, 8).require_known_block_sizes(False)
    assert (caught.value.reason, caught.value.metadata) == ("GROUP_BLOCK_SIZES_UNKNOWN", {"group_block_sizes": "4, 8"})
    session_of(4, 8).require_known_block_sizes(True)
    session_of(4, 4).require_known_block_sizes(False)
