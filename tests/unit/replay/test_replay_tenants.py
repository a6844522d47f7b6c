"""Tenants in a replay: whose requests are whose, what each got, and that the fair policy is another than the others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvmanager_service.replay.command import main
from kvmanager_service.replay.tenants import read_shares, spread
from kvmanager_service.replay.trace import TraceRequest

LIMITS = ("--num-blocks", "200", "--block-size", "8", "--max-num-seqs", "4")


def run(capsys: pytest.CaptureFixture[str], trace: Path, *options: str, pool: tuple[str, ...] = LIMITS) -> Any:
    assert main([str(trace), *pool, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def written(folder: Path, records: list[dict[str, object]]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture
def burst(tmp_path: Path) -> Path:
    """One tenant asks for everything first; the other comes a moment later with a little."""
    usual = {"prompt_length": 40, "output_length": 20}
    records: list[dict[str, object]] = [usual | {"arrival": 0.0, "tenant": "heavy"} for _ in range(60)]
    return written(tmp_path, records + [usual | {"arrival": 0.01, "tenant": "light"} for _ in range(5)])


@pytest.mark.parametrize("text", ["", "3", "3,", "3,0", "3,-1", "a,b", "1.5,2", ",".join(["1"] * 1001)])
def test_other_shares_are_wrong_usage(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), *LIMITS, f"--tenants={text}"])
    assert "expected 2 to 1000 shares of at least 1, such as 3,1" in capsys.readouterr().err


def test_spread_gives_each_its_share_of_any_stretch() -> None:
    trace = [TraceRequest(f"line-{index}", 0.0, ((1, 4),), 1) for index in range(60)]
    names = [traced.tenant for traced in spread(trace, read_shares("3,1,2"))]
    assert names == [traced.tenant for traced in spread(trace, (3, 1, 2))]
    for start in range(0, 60, 6):
        counts = [names[start : start + 6].count(f"tenant-{number}") for number in (1, 2, 3)]
        assert counts == [3, 1, 2]
    assert names[:4] != ["tenant-1"] * 3 + ["tenant-2"], "taken in turn, not in runs"


def test_fair_policy_serves_a_small_tenant_that_came_after_a_large_one(
    burst: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fcfs, fair = (run(capsys, burst, "--policy", policy)["tenants"] for policy in ("fcfs", "fair"))
    assert fcfs["light"]["ttft_s"]["p50"] > fcfs["heavy"]["ttft_s"]["max"], "behind all that came before"
    assert fair["light"]["ttft_s"]["max"] < fcfs["light"]["ttft_s"]["p50"] / 3
    assert fair["heavy"]["ttft_s"]["max"] > fcfs["heavy"]["ttft_s"]["max"], "at the expense of the large one"


def test_fair_weights_decide_whose_turn_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One has long prompts, the other long answers; whose tokens count little is served first."""
    records: list[dict[str, object]] = [
        {"arrival": 0.0, "prompt_length": prompt, "output_length": output, "tenant": tenant}
        for _ in range(20)
        for tenant, prompt, output in (("reads", 80, 4), ("writes", 8, 60))
    ]
    trace = written(tmp_path, records)
    ends = {}
    for output_weight in ("0.01", "100"):
        tenants = run(capsys, trace, "--policy", "fair", "--fair-output-weight", output_weight)["tenants"]
        ends[output_weight] = tenants["writes"]["queue_time_s"]["mean"] - tenants["reads"]["queue_time_s"]["mean"]
        assert tenants["reads"]["service"] == pytest.approx(20 * (80 + 4 * float(output_weight)))
    assert ends["0.01"] < 0 < ends["100"]


def test_tenants_parts_make_up_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(5)
    records: list[dict[str, object]] = [
        {
            "arrival": index * 0.02,
            "prompt_length": 2000 if index == 17 else rng.randint(20, 90),
            "prefix": [[f"p{rng.randrange(3)}", 16]],
            "output_length": rng.randint(1, 30),
            **({"tenant": rng.choice(["a", "b"])} if index % 3 else {}),
        }
        for index in range(80)
    ]
    document = run(capsys, written(tmp_path, records))
    tenants = document["tenants"]
    assert list(tenants) == ["", "a", "b"]
    for count in ("replayed", "refused", "failed"):
        assert sum(mine["requests"][count] for mine in tenants.values()) == document["requests"][count]
    assert document["requests"]["refused"] == 1
    for name in ("hit_tokens", "prompt_tokens"):
        assert sum(mine[name] for mine in tenants.values()) == document["prefix_cache"][name] > 0
    assert sum(mine["output_tokens"] for mine in tenants.values()) == document["output_tokens"]
    for times in ("ttft_s", "itl_s", "queue_time_s"):
        assert max(mine[times]["max"] for mine in tenants.values()) == document[times]["max"]


def test_tenants_without_a_clock_have_their_hits(burst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, burst, "--one-at-a-time")
    names = {"requests", "token_hit_ratio", "hit_tokens", "prompt_tokens"}
    assert {name: set(mine) for name, mine in document["tenants"].items()} == {"heavy": names, "light": names}
    assert document["tenants"]["light"]["prompt_tokens"] == 5 * 40


def test_trace_without_tenants_says_nothing_of_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, [{"arrival": 0.0, "prompt_length": 9, "output_length": 2}] * 4)
    assert "tenants" not in run(capsys, trace)
    given = run(capsys, trace, "--tenants", "3,1")
    assert {name: mine["requests"]["replayed"] for name, mine in given["tenants"].items()} == {
        "tenant-1": 3, "tenant-2": 1,
    }  # fmt: skip
    assert given["settings"]["tenants"] == [3, 1]


def test_tenants_given_to_a_trace_that_names_some_are_refused(burst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(burst), *LIMITS, "--tenants", "1,1", "--json"]) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["reason"], error["metadata"]["line"], error["metadata"]["got"]) == ("BAD_TRACE", 1, "'heavy'")


def test_isolated_tenants_share_no_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[dict[str, object]] = [
        {"arrival": float(index), "prompt_length": 40, "prefix": [["system", 32]], "output_length": 1}
        for index in range(8)
    ]
    trace = written(tmp_path, records)
    hits = [
        run(capsys, trace, "--tenants", "1,1", *more)["prefix_cache"]["hit_tokens"]
        for more in ((), ("--isolate-tenants",))
    ]
    assert hits == [7 * 32, 6 * 32]


def test_table_has_a_line_for_each_of_several_tenants(burst: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(burst), *LIMITS]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("tenant"))
    assert " ".join(heading.split()) == "tenant requests hits prompt output ttft p50 ttft p99 itl p99"
    rows = {line.split()[0]: line.split()[1:5] for line in lines[lines.index(heading) + 1 :] if line.strip()}
    assert rows == {"heavy": ["60", "0.0000", "2,400", "1,200"], "light": ["5", "0.0000", "200", "100"]}


def test_table_of_one_tenant_has_no_lines_of_tenants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, [{"arrival": 0.0, "prompt_length": 9, "output_length": 2, "tenant": "only"}])
    assert list(run(capsys, trace)["tenants"]) == ["only"]
    assert main([str(trace), *LIMITS]) == 0
    assert "only" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fair-input-weight", "0"), "--fair-input-weight: expected a number above 0"),
        (("--fair-output-weight", "-1"), "expected a number of at least 0, got '-1'"),
        (("--fair-cached-weight", "2"), "--fair-cached-weight: expected at most --fair-input-weight (1)"),
    ],
)
def test_wrong_options_of_tenants_say_what_is_expected(
    burst: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(burst), *LIMITS, *options])
    assert message in capsys.readouterr().err


def test_what_a_terminal_obeys_is_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of tenants, and what an error quotes of the trace."""
    request = {"arrival": 0.0, "prompt_length": 8, "output_length": 2}
    records: list[dict[str, object]] = [request | {"tenant": tenant} for tenant in ("\x1b[31mred", "b\u202e")]
    assert main([str(written(tmp_path, records)), *LIMITS]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b[31mred" in shown
    assert r"b\u202e" in shown
    records[1]["\x1b]0;owned\x07"] = 1
    assert main([str(written(tmp_path, records)), *LIMITS]) == 1
    error = capsys.readouterr().err
    assert r"\x1b]0;owned\x07" in error
    assert not {"\x1b", "\x07", "\u202e"} & set(shown + error)
