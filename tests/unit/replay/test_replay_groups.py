"""Replays of models with KV groups: what rows read, what is hit, and where the groups come from."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service import executor_groups
from kvmanager_service.calibration import report
from kvmanager_service.core.kv_cache import make_kv_cache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.core.request import NewRequest, Request, StopRules
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import BlockCopy, CopyDirection, ScheduledRow, Step
from kvmanager_service.replay import kv_geometry
from kvmanager_service.replay.command import main
from kvmanager_service.replay.cost_model import CostModel, quantities
from kvmanager_service.replay.group_reads import GroupReads
from kvmanager_service.replay.kv_geometry import (
    GroupShape,
    KvCacheFileError,
    KvGeometry,
    describe_groups,
    make_groups,
    read_groups,
    read_kv_cache,
)
from kvmanager_service.replay.one_at_a_time import replay_one_at_a_time
from kvmanager_service.replay.timed import TimedReplay
from kvmanager_service.replay.trace import TraceRequest

BLOCK_SIZE = 4
MIXED = "full,window:6,chunk:8,state:8"
GROUPS: dict[str, KVGroup] = {
    "full": FullAttention(4), "window": SlidingWindow(4, 6), "chunk": ChunkedLocal(4, 8), "state": RecurrentState(8),
}  # fmt: skip
FILE: dict[str, Any] = {
    "kv_cache": {
        "num_blocks": 90,
        "block_size": 8,
        "groups": [
            {"type": "sliding_window", "window": 20, "num_layers": 5},
            {"type": "full_attention", "num_layers": 1},
            {"type": "recurrent_state", "num_layers": 2},
        ],
    }
}


def conversations(count: int, gap: float, seed: int = 3) -> list[TraceRequest]:
    """Prompts over a few roots, some much longer than a window."""
    rng = random.Random(seed)
    trace = []
    for index in range(count):
        shared = tuple((rng.randrange(3) if depth == 0 else rng.randrange(5), 4) for depth in range(rng.randint(1, 9)))
        trace.append(TraceRequest(f"line-{index + 1}", gap * index, (*shared, (1000 + index, rng.randint(1, 7))), 1))
    return trace


def row(start: int, stop: int) -> ScheduledRow:
    request = Request(NewRequest("r", bytes(4 * stop), StopRules(max_tokens=1)), 0)
    request.num_computed_tokens = start
    return ScheduledRow(request, stop - start)


def step_of(*rows: ScheduledRow, copies: int = 0) -> Step:
    return Step(
        1,
        list(rows),
        sum(one.num_tokens for one in rows),
        len(rows),
        feeds_from_step_id=0,
        tags=[],
        copies=[BlockCopy(CopyDirection.DEVICE_TO_HOST, 1, 1)] * copies,
    )


# --- what rows read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
def test_reads_of_one_kind_are_counted_token_by_token(kind: str) -> None:
    group = GROUPS[kind]
    reads = GroupReads([group])
    for start in range(30):
        for stop in range(start + 1, 31):
            attended = [range(group.first_needed_token(position), position + 1) for position in range(start, stop)]
            assert reads.context(start, stop) == len(set().union(*attended)), (start, stop)
            assert reads.pairs(start, stop) == sum(map(len, attended)), (start, stop)


def test_reads_of_a_state_are_none_and_a_mean_is_over_layers() -> None:
    state, full, window = GroupReads([GROUPS["state"]]), GroupReads([GROUPS["full"]]), GroupReads([GROUPS["window"]])
    assert (state.context(5, 9), state.pairs(5, 9), state.has_kv) == (0, 0, False)
    mixed = GroupReads([GROUPS["full"], GROUPS["window"], GROUPS["window"], GROUPS["state"]], [4, 3, 1, 8])
    for ask in (GroupReads.context, GroupReads.pairs):
        expected = (4 * ask(full, 11, 20) + 4 * ask(window, 11, 20)) / 16
        assert ask(mixed, 11, 20) == pytest.approx(expected)
    assert mixed.has_kv


def test_quantities_of_full_attention_are_the_same_however_they_are_reckoned() -> None:
    step = step_of(row(0, 9), row(20, 21), row(7, 19))
    plain = quantities(step)
    # A window that nothing reaches out of is counted by the way of groups.
    assert quantities(step, GroupReads([SlidingWindow(4, 1000), FullAttention(4)])) == pytest.approx(plain)
    assert plain == (1, 21, 1, 9 + 21 + 19, 45 + 162)


def test_copy_of_one_of_several_groups_blocks_costs_its_part() -> None:
    cost = CostModel(copy_token_us=3.0)
    step = step_of(copies=2)
    assert cost.seconds(step, GroupReads([FullAttention(16)])) == pytest.approx(2 * 16 * 3e-6)
    halves = [FullAttention(16), SlidingWindow(16, 64)]
    assert cost.seconds(step, GroupReads(halves)) == cost.copy_seconds(step, GroupReads(halves)) == pytest.approx(48e-6)


def test_step_of_a_model_with_windows_takes_less_time_for_what_they_leave() -> None:
    """A row at length 1,001, three quarters of whose layers read 100 tokens of it."""
    cost = CostModel(step_us=0, prefill_token_us=0, decode_row_us=0, context_token_us=1.0, attention_pair_us=0)
    reads = GroupReads([FullAttention(16), SlidingWindow(16, 100)], [1, 3])
    assert cost.seconds(step_of(row(1000, 1001)), reads) == pytest.approx((1001 + 3 * 100) / 4 * 1e-6)


# --- what is hit ------------------------------------------------------------------------------------------------------


def test_window_that_nothing_leaves_hits_what_full_attention_does() -> None:
    """Two groups take twice the blocks, and are hit and evicted alike."""
    trace = conversations(300, 1.0)
    alone = replay_one_at_a_time(trace, KVCacheManager(41, BLOCK_SIZE))
    groups = make_groups(read_groups("full,window:1000"), BLOCK_SIZE)
    both = replay_one_at_a_time(trace, make_kv_cache(81, groups, longest_chunk=64))
    assert 0 < alone.hit_blocks < alone.prompt_blocks
    assert alone.evictions > 100
    names = ("num_requests", "hit_tokens", "prompt_tokens", "hit_blocks", "prompt_blocks")
    assert [getattr(both, name) for name in names] == [getattr(alone, name) for name in names]


@pytest.mark.parametrize("text", ["window:6", "full,2xwindow:6", "state", MIXED])
def test_groups_far_apart_hit_what_they_hit_one_at_a_time(text: str) -> None:
    trace = conversations(200, 1000.0)
    groups = make_groups(read_groups(text), BLOCK_SIZE)
    caches = [make_kv_cache(60, groups, longest_chunk=16) for _ in range(2)]
    alone = replay_one_at_a_time(trace, caches[0])
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8, max_waiting=len(trace), max_outstanding=1)
    scheduler = Scheduler(config, caches[1])
    timed = TimedReplay(trace, scheduler, CostModel()).run()
    scheduler.check_integrity()
    assert isinstance(caches[1], KVCacheCoordinator)
    assert 0 < alone.hit_tokens < alone.prompt_tokens
    assert alone.evictions > 50
    names = ("num_requests", "hit_blocks", "prompt_blocks", "hit_tokens", "prompt_tokens", "evictions")
    assert [getattr(alone, name) for name in names] == [getattr(timed, name) for name in names]
    for kv in caches:
        kv.check_integrity([])
        assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks


def test_long_sequences_fit_a_window_where_full_attention_has_no_room() -> None:
    trace = [TraceRequest("line-1", 0.0, ((1, 400),), 8)]
    fits = {}
    for text in ("full", "window:16"):
        kv = make_kv_cache(30, make_groups(read_groups(text), BLOCK_SIZE), longest_chunk=16)
        fits[text] = replay_one_at_a_time(trace, kv).refused == 0
    assert fits == {"full": False, "window:16": True}


# --- where groups come from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes", "described"),
    [
        ("full", [("full", 0)], "full"),
        ("window:6, full", [("full", 0), ("window", 6)], "full,window:6"),
        ("full,3xwindow:1024", [("full", 0)] + [("window", 1024)] * 3, "full,3xwindow:1024"),
        ("2xstate,state:512,chunk:8", [("state", 0)] * 2 + [("state", 512), ("chunk", 8)], "2xstate,state:512,chunk:8"),
    ],
)
def test_groups_are_read_and_described(text: str, shapes: list[tuple[str, int]], described: str) -> None:
    groups = read_groups(text)
    assert [(group.kind, group.size) for group in groups] == shapes
    assert describe_groups(groups) == described
    assert read_groups(described) == groups
    made = make_groups(groups, 16)
    assert [group.block_size for group in made] == [size if kind == "state" and size else 16 for kind, size in shapes]


@pytest.mark.parametrize(
    "text", ["", "full,", "full:3", "window", "window:0", "chunk", "0xfull", "fullx2", "mamba", "65xfull", "-1xfull"]
)
def test_other_groups_are_wrong_usage(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--num-blocks", "9", f"--kv-groups={text}"])
    assert "such as full,5xwindow:1024" in capsys.readouterr().err


def test_a_replay_takes_as_many_groups_as_the_manager() -> None:
    """It may not ask it: a replay knows nothing of the wire."""
    assert kv_geometry.MAX_GROUPS == executor_groups.MAX_GROUPS


def written(folder: Path, document: object) -> Path:
    path = folder / "kv.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def changed(**values: object) -> dict[str, Any]:
    return {"kv_cache": FILE["kv_cache"] | values}


def test_groups_with_block_sizes_of_their_own_are_read_described_and_made() -> None:
    shapes = read_groups("2xwindow:6@8,full@2,chunk:8,state:8")
    assert describe_groups(shapes) == "full@2,2xwindow:6@8,chunk:8,state:8"
    full, window, _, chunk, state = make_groups(shapes, 4)
    assert [group.block_size for group in (full, window, chunk, state)] == [2, 8, 4, 8]
    assert isinstance(window, SlidingWindow)
    assert window.window == 6
    for text in ("state@8", "state:8@8", "full@0", "full@", "window@8"):
        with pytest.raises(ValueError, match=text):
            read_groups(text)


def test_read_kv_cache_takes_its_part_and_puts_full_attention_first(tmp_path: Path) -> None:
    groups = (GroupShape("full", 0, 1), GroupShape("window", 20, 5), GroupShape("state", 0, 2))
    assert read_kv_cache(written(tmp_path, FILE | {"capacity": 3})) == KvGeometry(90, 8, groups)


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        (pb.KvGroup(type=pb.KV_GROUP_TYPE_FULL_ATTENTION, num_layers=3), GroupShape("full", 0, 3)),
        (pb.KvGroup(type=pb.KV_GROUP_TYPE_SLIDING_WINDOW, window=20, num_layers=3), GroupShape("window", 20, 3)),
        (pb.KvGroup(type=pb.KV_GROUP_TYPE_CHUNKED_LOCAL, chunk=8, num_layers=3), GroupShape("chunk", 8, 3)),
        (pb.KvGroup(type=pb.KV_GROUP_TYPE_RECURRENT_STATE, num_layers=3), GroupShape("state", 0, 3)),
        (pb.KvGroup(type=pb.KV_GROUP_TYPE_RECURRENT_STATE, num_layers=3, block_size=64), GroupShape("state", 64, 3)),
        (pb.KvGroup(type=pb.KV_GROUP_TYPE_FULL_ATTENTION, num_layers=3, block_size=32), GroupShape("full", 0, 3, 32)),
        (
            pb.KvGroup(type=pb.KV_GROUP_TYPE_SLIDING_WINDOW, window=20, num_layers=3, block_size=32),
            GroupShape("window", 20, 3, 32),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, GroupShape) else "",
)
def test_read_kv_cache_takes_each_type_that_calibration_writes(
    tmp_path: Path, group: pb.KvGroup, shape: GroupShape
) -> None:
    written_group = report._group(group)
    assert read_kv_cache(written(tmp_path, changed(groups=[written_group]))).groups == (shape,)


@pytest.mark.parametrize(
    ("document", "expected", "got"),
    [
        ("{", "a JSON object", "line 1"),
        ("[" * 100_000, "a JSON object", "recursion"),
        ([], 'an object "kv_cache"', "none"),
        ({"kv_cache": 3}, 'an object "kv_cache"', "none"),
        (changed(groups=None), "a list of 1 to 64 groups", "none"),
        (changed(groups=[]), "a list of 1 to 64 groups", "0"),
        (changed(groups=[3]), "groups with a type of full_attention", "3"),
        (changed(groups=[{"type": "linear"}]), "groups with a type of full_attention", "linear"),
        (changed(groups=[{"type": "sliding_window", "num_layers": 1}]), "window of a group: an integer", "None"),
        (
            changed(groups=[{"type": "chunked_local", "window": 4, "num_layers": 1}]),
            "chunk of a group: an integer",
            "None",
        ),
        (changed(groups=[{"type": "full_attention"}]), "num_layers of a group: an integer", "None"),
        (changed(num_blocks=1), "num_blocks: an integer in 2 to 67108864", "1"),
        (changed(block_size=0), "block_size: an integer in 1 to 2147483647", "0"),
        (
            changed(groups=[{"type": "full_attention", "num_layers": 1, "block_size": -1}]),
            "block_size of a group: an integer in 0 to 2147483647",
            "-1",
        ),
        (changed(block_size=True), "block_size: an integer in 1 to 2147483647", "True"),
    ],
)
def test_read_kv_cache_of_another_file_says_what_is_expected(
    tmp_path: Path, document: object, expected: str, got: str
) -> None:
    with pytest.raises(KvCacheFileError, match="kvplane plan MODEL") as caught:
        read_kv_cache(written(tmp_path, document))
    assert expected in caught.value.expected
    assert got in caught.value.got


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival": index / 10, "prompt_length": 90, "prefix": [["system", 64]], "output_length": 5}
        for index in range(20)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_kv_cache_file_gives_blocks_their_size_and_groups_and_flags_win(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, FILE)
    settings = replayed(capsys, trace, "--kv-cache", file)["settings"]
    known = {name: settings[name] for name in ("num_blocks", "block_size", "kv_groups", "kv_cache")}
    assert known == {"num_blocks": 90, "block_size": 8, "kv_groups": "full,window:20,state", "kv_cache": str(file)}
    flags = ("--num-blocks", 70, "--block-size", 16, "--kv-groups", "full,window:30")
    settings = replayed(capsys, trace, "--kv-cache", file, *flags)["settings"]
    assert [settings[name] for name in known] == [70, 16, "full,window:30", str(file)]
    without = replayed(capsys, trace, "--num-blocks", 70)["settings"]
    assert [without[name] for name in known] == [70, 16, "full", None]


def test_kv_cache_comes_from_standard_input_too(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(FILE)))
    assert replayed(capsys, trace, "--kv-cache", "-")["settings"]["num_blocks"] == 90


def test_layers_of_the_file_decide_what_a_step_reads(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The more layers have a window, the less is read."""
    only = ("--step-us", 0, "--prefill-token-us", 0, "--decode-row-us", 0, "--context-token-us", 1000)
    times = []
    for num_layers in (1, 100):
        groups = [
            {"type": "full_attention", "num_layers": 1},
            {"type": "sliding_window", "window": 8, "num_layers": num_layers},
        ]
        file = written(tmp_path, {"kv_cache": {"num_blocks": 900, "block_size": 8, "groups": groups}})
        times.append(replayed(capsys, trace, "--kv-cache", file, *only)["itl_s"]["mean"])
    assert times[1] < times[0] / 2


def test_num_blocks_of_0_is_enough_for_all_groups(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, trace, "--num-blocks", 0, "--kv-groups", "full,2xwindow:16")
    assert found["settings"]["num_blocks"] == 2 + 20 * 3 * 6
    assert (found["prefix_cache"]["evicted_blocks"], found["prefix_cache"]["hit_tokens"]) == (0, 19 * 64)


def test_hits_of_groups_are_counted_in_pieces_that_they_agree_on(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state is kept every 48 tokens: of a prompt of 90 one piece of two is hit, whatever blocks it lies in."""
    cache = replayed(capsys, trace, "--num-blocks", 900, "--kv-groups", "full,state:48", "--one-at-a-time")[
        "prefix_cache"
    ]
    assert (cache["hit_blocks"], cache["prompt_blocks"], cache["hit_tokens"]) == (19, 20 * 2, 19 * 48)


def test_hits_of_unequal_blocks_are_multiples_of_all(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 64 common tokens 48 are whole blocks of 16 and of 24."""
    flags = ("--num-blocks", 900, "--kv-groups", "full,window:20@24", "--one-at-a-time")
    cache = replayed(capsys, trace, *flags)["prefix_cache"]
    assert (cache["hit_blocks"], cache["prompt_blocks"], cache["hit_tokens"]) == (19, 20 * 2, 19 * 48)


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_groups_swap_and_end(trace: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    found = replayed(
        capsys, trace, "--num-blocks", 40, "--block-size", 8, "--kv-groups", "full,window:16", "--speedup", 100,
        "--preemption-mode", mode, "--num-host-blocks", 200,
    )  # fmt: skip
    assert found["requests"] == {"replayed": 20, "refused": 0, "failed": 0}
    assert found["output_tokens"] == 100


def test_table_names_the_groups(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--num-blocks", "90", "--kv-groups", "full,window:20"]) == 0
    assert "full,window:20" in capsys.readouterr().out


def test_kv_cache_file_that_is_none_exits_1(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--kv-cache", str(trace), "--json"]) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["reason"], error["metadata"]["path"]) == ("BAD_KV_CACHE", str(trace))
