"""What tests of the tests count as noticed: a check that finds something, not a core that crashes."""

from __future__ import annotations

import pytest

from kvmanager_service.core.kv_cache_manager import KVCacheManager
from tests.simulation.broken import require_notice
from tests.simulation.life import Life
from tests.simulation.test_mutations import freed_blocks_keep_a_reference

pytestmark = pytest.mark.patches_core

LIVES = [Life(seed, num_requests=5) for seed in (1, 2)]


def test_require_notice_core_that_crashes_was_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: KVCacheManager, request: object, reserve: int = 0) -> bool:
        raise IndexError("list index out of range")

    monkeypatch.setattr(KVCacheManager, "allocate_sequence", crash)
    with pytest.raises(pytest.fail.Exception, match=r"went unnoticed for 2 lives; crashed: {'IndexError': 2}"):
        require_notice(LIVES)


def test_require_notice_mutation_of_what_is_no_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "allocate_sequence", lambda self: True)
    with pytest.raises(TypeError, match="positional argument"):
        require_notice(LIVES)


def test_require_notice_sound_core_is_found_to_be_sound() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"went unnoticed for 2 lives; crashed: {}"):
        require_notice(LIVES)


def test_require_notice_broken_core_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed_blocks_keep_a_reference(monkeypatch)
    require_notice(Life(seed) for seed in range(1, 10))
