"""Trace readers: what each format becomes, and what is said of a line that is wrong."""

import json
import os
import threading
from pathlib import Path

import pytest

from kvmanager_service.core.retention import END_OF_SEQUENCE, RetentionRange
from kvmanager_service.replay.trace import FIRST_UNIQUE_TOKEN, TraceError, read_trace

MOONCAKE = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}
KVPLANE = {"arrival": 1.5, "prompt_length": 30, "output_length": 5}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
AT = "2023-11-16 18:15:46.6805900"


def write(folder: Path, *records: object) -> Path:
    path = folder / "trace"
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in records))
    return path


def test_mooncake_ids_become_runs_and_the_last_is_cut_to_the_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE, "", MOONCAKE | {"timestamp": 4500, "output_length": 0})
    first, second = read_trace(path)
    assert first.parts == ((4, 512), (9, 188))
    assert (first.prompt_length, first.output_length, first.arrival) == (700, 5, 0.0)
    assert (second.request_id, second.output_length, second.arrival) == ("line-3", 1, 1.5)
    assert first.with_whole_runs(512).prompt_length == 1024
    prompt = first.to_new_request(0.0).prompt
    assert prompt == (4).to_bytes(4, "little") * 512 + (9).to_bytes(4, "little") * 188


def test_azure_prompts_begin_differently(tmp_path: Path) -> None:
    lines = (
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,0",
    )
    first, second = read_trace(write(tmp_path, *lines))
    assert (first.prompt_length, first.output_length, first.arrival) == (374, 44, 0.0)
    assert second.arrival == pytest.approx(4.314579, abs=1e-5)
    assert second.output_length == 1
    assert first.parts[0][0] != second.parts[0][0]


def test_kvplane_explicit_ids_and_shared_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"arrival": 1, "prompt_token_ids": [7, 8, 7], "output_length": 1, "priority": -1},
        KVPLANE
        | {
            "prefix": [["system", 10], ["user", 5]],
            "retention_priority": 9,
            "cache_salt": "s",
            "tenant": "acme",
            "retention": [[0, 10, 80, 60], [30, None, -5]],
        },
        KVPLANE | {"prefix": [["system", 10], ["other", 20]]},
    )
    ids, first, second = read_trace(path)
    new = first.to_new_request(1.0)
    assert ids.to_new_request(0.0).prompt == b"".join(token.to_bytes(4, "little") for token in (7, 8, 7))
    assert (ids.arrival, ids.priority, ids.tenant) == (0.0, -1, "")
    assert (first.arrival, first.tenant, new.tenant) == (0.5, "acme", "acme")
    assert first.parts == ((0, 10), (1, 5), (FIRST_UNIQUE_TOKEN + 2, 15))
    assert second.parts == ((0, 10), (2, 20))
    assert (new.retention_priority, new.cache_salt, new.stop.max_tokens) == (9, "s", 5)
    assert new.retention == (RetentionRange(0, 10, 80, 60.0), RetentionRange(30, END_OF_SEQUENCE, -5))


def test_read_trace_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, MOONCAKE, MOONCAKE, "broken"), limit=2)) == 2


@pytest.mark.parametrize(
    ("lines", "line", "expected", "got"),
    [
        ((), 1, "a first line of one of the formats", "none"),
        (("what is this",), 1, "a first line of one of the formats", "what is this"),
        ((MOONCAKE, "{"), 2, "a JSON object", "{"),
        ((MOONCAKE, "[]"), 2, "a JSON object", "[]"),
        ((MOONCAKE, MOONCAKE | {"timestamp": -1}), 2, "timestamp: a number in 0 to 1e+12", "-1"),
        ((MOONCAKE, MOONCAKE | {"timestamp": float("nan")}), 2, "timestamp: a number in 0 to 1e+12", "nan"),
        ((MOONCAKE | {"input_length": 0},), 1, "input_length: an integer in 1", "0"),
        ((MOONCAKE | {"output_length": "5"},), 1, "output_length: an integer in 0", "'5'"),
        ((MOONCAKE | {"hash_ids": [4]},), 1, "2 hash_ids for an input_length of 700", "1"),
        ((MOONCAKE | {"hash_ids": [4, -1]},), 1, "hash_ids: an integer in 0", "-1"),
        ((MOONCAKE | {"hash_ids": [4, True]},), 1, "hash_ids: an integer in 0", "True"),
        (({"hash_ids": [4], "input_length": 9, "output_length": 1},), 1, "timestamp: a number", "nothing"),
        ((MOONCAKE | {"hash_ids": 4},), 1, "hash_ids: a list", "4"),
        (("TIMESTAMP,Tokens",), 1, "the columns TIMESTAMP,ContextTokens,GeneratedTokens", "TIMESTAMP,Tokens"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens",), 1, "at least one request", "none"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"), 2, "TIMESTAMP: a time", "noon"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,1"), 2, "3 columns", "2"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,1,-1"), 2, "GeneratedTokens: an integer", "-1"),
        ((KVPLANE | {"colour": 1},), 1, "no fields but arrival", "colour"),
        ((KVPLANE | {"prompt_token_ids": [1]},), 1, "either prompt_token_ids or prompt_length", "prompt_token_ids"),
        (({"arrival": 0, "output_length": 1},), 1, "either prompt_token_ids or prompt_length", "arrival"),
        (({"arrival": 0, "prompt_token_ids": [], "output_length": 1},), 1, "number of prompt_token_ids", "0"),
        (({"arrival": 0, "prompt_token_ids": [1 << 29], "output_length": 1},), 1, "prompt_token_ids:", "5368"),
        ((KVPLANE | {"output_length": 0},), 1, "output_length: an integer in 1", "0"),
        ((KVPLANE | {"prefix": ["system"]},), 1, "prefix: pairs of name and length", "'system'"),
        ((KVPLANE | {"prefix": [["system", 0]]},), 1, "length of prefix 'system'", "0"),
        ((KVPLANE | {"prefix": [["system", 31]]},), 1, "no longer than prompt_length", "1 tokens more"),
        ((KVPLANE | {"retention_priority": 101},), 1, "retention_priority: an integer in -100 to 100", "101"),
        ((KVPLANE | {"retention": [[0, 4]]},), 1, "retention: lists of start, stop, priority", "[0, 4]"),
        ((KVPLANE | {"retention": [[31, None, 0]]},), 1, "retention start: an integer in 0 to 30", "31"),
        ((KVPLANE | {"retention": [[4, 4, 0]]},), 1, "retention stop: an integer in 5 to 30", "4"),
        ((KVPLANE | {"retention": [[0, 31, 0]]},), 1, "retention stop: an integer in 1 to 30", "31"),
        ((KVPLANE | {"retention": [[0, 4, 101]]},), 1, "retention priority: an integer in -100 to 100", "101"),
        ((KVPLANE | {"retention": [[0, 4, 1, -1]]},), 1, "retention seconds: a number in 0", "-1"),
        ((KVPLANE | {"retention": [[0, 4, 1]] * 65},), 1, "number of retention ranges", "65"),
        ((KVPLANE | {"cache_salt": 5},), 1, "cache_salt: a string", "5"),
        ((KVPLANE | {"tenant": None},), 1, "tenant: a string", "nothing"),
        ((KVPLANE | {"tenant": 7},), 1, "tenant: a string", "7"),
        ((KVPLANE | {"arrival": -0.5},), 1, "arrival: a number in 0 to 1e+12", "-0.5"),
        ((KVPLANE | {"arrival": 1e300},), 1, "arrival: a number in 0 to 1e+12", "1e+300"),
        ((KVPLANE | {"cache_salt": "\ud800"},), 1, "cache_salt: a string of whole characters", r"'\ud800'"),
        ((KVPLANE | {"tenant": "a\udfff"},), 1, "tenant: a string of whole characters", r"'a\udfff'"),
        ((KVPLANE | {"prefix": [["\ud800", 4]]},), 1, "name of a prefix: a string of whole", r"'\ud800'"),
        (("[" * 200_000 + '"arrival"',), 1, "a JSON object", "[[["),
        ((KVPLANE | {"arrival": "1"},), 1, "arrival: a number in 0 to 1e+12", "'1'"),
        ((KVPLANE, MOONCAKE), 2, "no fields but arrival", "hash_ids"),
        ((MOONCAKE, KVPLANE), 2, "hash_ids: a list", "nothing"),
        ((MOONCAKE, "[" * 100_000), 2, "a JSON object", "[["),
        ((AZURE, f"{AT},-5,1"), 2, "ContextTokens: an integer in 0", "-5"),
        ((AZURE, f"{AT},5,1.5"), 2, "GeneratedTokens: an integer in 0", "1.5"),
        ((AZURE, f"{AT},,1"), 2, "ContextTokens: an integer in 0", "nothing"),
        ((AZURE, f"{AT},1,1", f'{AT},"1,1'), 3, "comma-separated values", "unexpected end of data"),
        ((MOONCAKE, MOONCAKE | {"timestamp": 2500}), 2, "no earlier than the one before it", "one 0.5 s earlier"),
        ((KVPLANE, "", KVPLANE | {"arrival": 1}), 3, "no earlier than the one before it", "one 0.5 s earlier"),
        ((AZURE, f"{AT},1,1", "2023-11-16 18:15:44.1805900,1,1"), 3, "sort the trace by time", "one 2.5 s earlier"),
    ],
)  # fmt: skip
def test_read_trace_bad_line_says_where_expected_and_got(
    tmp_path: Path, lines: tuple[object, ...], line: int, expected: str, got: str
) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    error = caught.value
    assert (error.path, error.line) == (str(path), line)
    assert expected in error.expected
    assert got in error.got
    assert f"line {line}: expected {error.expected}, got {error.got}" in str(error)


@pytest.mark.parametrize(
    ("trace_format", "expected", "got"),
    [
        ("mooncake", "at least one request", "none"),
        ("kvplane", "at least one request", "none"),
        ("azure", f"the columns {AZURE}, in any order", "nothing"),
    ],
)
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_read_trace_empty_file_of_a_named_format_is_an_error(
    tmp_path: Path, trace_format: str, expected: str, got: str, content: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, trace_format)
    assert (caught.value.expected, caught.value.got) == (expected, got)


@pytest.mark.parametrize(
    ("trace_format", "lines", "expected"),
    [
        ("mooncake", (KVPLANE,), "hash_ids: a list"),
        ("kvplane", (MOONCAKE,), "no fields but arrival"),
        ("azure", (MOONCAKE,), f"the columns {AZURE}"),
        ("azure", ("TIMESTAMP,GeneratedTokens,GeneratedTokens", f"{AT},1,1"), f"the columns {AZURE}"),
        ("mooncake", (AZURE, f"{AT},1,1"), "a JSON object"),
    ],
)
def test_read_trace_of_another_format_than_named_is_an_error_of_line_1(
    tmp_path: Path, trace_format: str, lines: tuple[object, ...], expected: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, *lines), trace_format)
    assert caught.value.line == 1
    assert expected in caught.value.expected


def test_azure_as_spreadsheets_write_it_is_read(tmp_path: Path) -> None:
    """With a mark of byte order, ends of lines of two bytes, quotes, and times with a zone."""
    path = tmp_path / "trace.csv"
    lines = (AZURE, '"2024-05-10 00:00:00.009930+00:00",2162,5', "2024-05-10 01:00:01.009930+01:00,2399,6")
    path.write_bytes(b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode())
    first, second = read_trace(path)
    assert (first.prompt_length, second.prompt_length, second.output_length) == (2162, 2399, 6)
    assert second.arrival == pytest.approx(1.0)


@pytest.mark.parametrize("trace_format", ["auto", "azure"])
def test_azure_columns_are_told_by_their_names(tmp_path: Path, trace_format: str) -> None:
    path = write(tmp_path, "GeneratedTokens,TIMESTAMP,ContextTokens", f"44,{AT},374")
    (only,) = read_trace(path, trace_format)
    assert (only.prompt_length, only.output_length) == (374, 44)


def test_read_trace_of_a_pipe_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(f"{json.dumps(MOONCAKE)}\n" * 3,), daemon=True)
    writer.start()
    assert len(read_trace(path)) == 3
    writer.join()


def test_read_trace_bytes_that_are_no_text_are_an_error_of_their_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(json.dumps(MOONCAKE).encode() + b"\n\xff\xfe\n")
    with pytest.raises(TraceError, match="expected UTF-8 text"):
        read_trace(path)
