import gc

from kvmanager_service.core.block import BlockContent
from kvmanager_service.step_loop import settle_heap


def test_settle_heap_a_cache_that_fills_brings_about_no_full_collection():
    before = gc.get_threshold()
    full = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    settle_heap()
    gc.callbacks.append(note)
    try:
        contents = [BlockContent(serial, b"hash", None, b"tokens", b"") for serial in range(200_000)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        gc.unfreeze()
    assert len(contents) == 200_000
    assert full == []
