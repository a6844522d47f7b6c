"""The commands against a scripted manager: output, JSON shapes, exit codes, interrupts."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane_client.cli.main import app
from typer.main import get_command
from typer.testing import CliRunner, Result

from tests.certificates import make_certificate
from tests.integration.client.scripted_manager import (
    TEXT,
    ThreadedManager,
    answer,
    break_after,
    fail,
    failing_stream,
    hang_after,
    succeed_with,
)

COMMAND = [sys.executable, "-m", "kvplane_client.cli"]


class Cli:
    """The command, pointed at a manager."""

    def __init__(self, address: str) -> None:
        self.environment = {"KVPLANE_SERVER": address}

    def __call__(self, *arguments: str, stdin: str | None = None, columns: int = 80) -> Result:
        environment = self.environment | {"COLUMNS": str(columns)}
        return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.environment}
        return subprocess.Popen([*COMMAND, *arguments], env=environment, text=True, **options)


@pytest.fixture
def cli(threaded_manager: ThreadedManager) -> Cli:
    """The command."""
    return Cli(threaded_manager.address)


@pytest.fixture
def nobody() -> Cli:
    """The command, pointed at a port nobody listens on."""
    with ThreadedManager() as stopped:
        address = stopped.address
    return Cli(address)


async def aborted(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    """Ends as if somebody had aborted it."""
    async for message in answer(request, context):
        if message.finish_reason:
            message.finish_reason = common_pb2.FINISH_REASON_ABORT
        yield message


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_key_that_would_leave_this_machine_is_warned_of_once(cli: Cli) -> None:
    """A name of RFC 6761, which leads nowhere."""
    cli.environment |= {"KVPLANE_API_KEY": "a-key-0123456789", "KVPLANE_SERVER": "dns:///kvplane.invalid:1"}
    plain = cli("generate", "hi")
    assert plain.exit_code == 3
    assert " ".join(plain.stderr.split()).count("the key goes to dns:///kvplane.invalid:1 in plain text") == 1
    as_json = [json.loads(line) for line in cli("stats", "--json").stderr.splitlines()]
    assert [line.get("event", "error") for line in as_json] == ["warning", "error"]
    assert "0123456789" not in plain.stderr + str(as_json)


def test_key_that_is_none_is_wrong_usage_and_not_quoted(cli: Cli) -> None:
    cli.environment |= {"KVPLANE_API_KEY": "two words-0123456789"}
    result = cli("stats")
    assert result.exit_code == 2
    assert "expected a key in KVPLANE_API_KEY" in " ".join(result.stderr.replace("│", " ").split())
    assert "0123456789" not in result.stderr


def test_generate_prints_the_text_and_a_newline(cli: Cli) -> None:
    result = cli("generate", "hello")

    assert (result.exit_code, result.stdout, result.stderr) == (0, TEXT + "\n", "")


def test_generate_reads_the_prompt_from_stdin(cli: Cli, threaded_manager: ThreadedManager) -> None:
    assert cli("generate", stdin="from a pipe\n").stdout == TEXT + "\n"
    assert cli("generate", "-", "--no-stream", stdin="dash").stdout == TEXT + "\n"
    assert [request.text for request in threaded_manager.scripts.of("Generate")] == ["from a pipe\n", "dash"]


def test_generate_passes_every_flag(cli: Cli, threaded_manager: ThreadedManager) -> None:
    result = cli(
        "generate", "--chat", "hi", "--system", "be brief", "-t", "0", "--top-k", "4", "--top-p", "0.75", "--min-p",
        "0.25", "--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5",
        "--logit-bias", "3:-1.5", "--seed", "11", "--logprobs", "2", "-n", "5", "--min-tokens", "1", "--stop", "x",
        "--stop", "y", "--stop-token-id", "9", "--ignore-eos", "--include-stop", "--priority", "-2",
        "--retention-priority", "9", "--retention", ":512=80", "--retention", "512:=-10/1.5", "--retention",
        "decode=3/60", "--cache-salt", "salt", "--tenant", "t", "--request-id", "r", "--deadline", "60",
        "--usage",
    )  # fmt: skip

    assert result.exit_code == 0, result.stderr
    expected = pb.GenerateRequest(
        request_id="r",
        chat=pb.ChatPrompt(
            messages=[pb.ChatMessage(role="system", content="be brief"), pb.ChatMessage(role="user", content="hi")]
        ),
        sampling=pb.SamplingParams(
            temperature=0, top_k=4, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={3: -1.5}, seed=11, logprobs=2,
        ),
        stopping=pb.StoppingParams(
            max_tokens=5, min_tokens=1, stop=["x", "y"], stop_token_ids=[9], ignore_eos=True, include_stop=True
        ),
        priority=-2, retention_priority=9, cache_salt="salt", tenant="t",
        retention=pb.Retention(
            ranges=[
                pb.RetentionRange(start=0, stop=512, level=pb.RetentionLevel(priority=80)),
                pb.RetentionRange(start=512, level=pb.RetentionLevel(priority=-10, duration_ms=1_500)),
            ],
            decode=pb.RetentionLevel(priority=3, duration_ms=60_000),
        ),
    )  # fmt: skip
    assert threaded_manager.scripts.of("Generate") == [expected]
    assert "length · 7 prompt tokens (3 cached) · 5 completion tokens · r" in result.stderr


@pytest.mark.parametrize(
    "item", ["512=80", ":512", ":512=", ":512=high", "a:b=1", "decode=", "decode=1/", "decode=1/soon", "=5"]
)
def test_generate_bad_retention_is_wrong_usage(cli: Cli, threaded_manager: ThreadedManager, item: str) -> None:
    result = cli("generate", "hello", "--retention", item)

    assert result.exit_code == 2
    assert "START:STOP=PRIORITY" in " ".join(result.stderr.split())
    assert threaded_manager.scripts.of("Generate") == []


def test_generate_retention_that_no_request_can_carry_is_wrong_usage(cli: Cli) -> None:
    twice = cli("generate", "hello", "--retention", "decode=1", "--retention", "decode=2")
    below = cli("generate", "hello", "--retention", "decode=1/-5")

    assert (twice.exit_code, below.exit_code) == (2, 2)
    assert "SECONDS above 0" in " ".join(below.stderr.replace("│", " ").split())


def test_pin_takes_text_from_argument_or_stdin_or_token_ids(cli: Cli, threaded_manager: ThreadedManager) -> None:
    first = cli("pin", "system", "Be brief.", "--cache-salt", "s", "--tenant", "t", "--adapter", "a")
    assert cli("pin", "system", stdin="from a pipe").exit_code == 0
    (document,) = lines(cli("pin", "system", "--token-ids", "1,2 3", "--json"))

    assert first.stdout == ("pinned system: 70 tokens, 3 of 4 full blocks held; the rest once a request computes it\n")
    assert document == {"name": "system", "num_tokens": 70, "num_blocks": 4, "held_blocks": 3, "keys": None}
    assert threaded_manager.scripts.of("PinPrefix") == [
        manager_pb.PinPrefixRequest(name="system", text="Be brief.", cache_salt="s", tenant="t", adapter="a"),
        manager_pb.PinPrefixRequest(name="system", text="from a pipe"),
        manager_pb.PinPrefixRequest(name="system", token_ids=pb.TokenIds(ids=[1, 2, 3])),
    ]
    assert cli("pin", "system", "text", "--token-ids", "1").exit_code == 2
    assert cli("pin", "system", stdin="").exit_code == 2


def test_adapter_load_list_and_unload(cli: Cli, threaded_manager: ThreadedManager) -> None:
    assert cli("adapter", "load", "support", "/lora/support").stdout == (
        "loaded support: revision r1, rank 8, 2.5 MB\n"
    )
    assert threaded_manager.scripts.of("LoadAdapter") == [
        manager_pb.LoadAdapterRequest(name="support", source="/lora/support")
    ]
    plain, (document,) = cli("adapter", "list"), lines(cli("adapter", "list", "--json"))
    assert [line.split() for line in plain.stdout.splitlines()[1:3]] == [
        ["support", "8", "2.5", "3", "r1", "/lora/support"], ["[b]", "16", "0.4", "0", "r2", "org/b"],
    ]  # fmt: skip
    assert [one["name"] for one in document["adapters"]] == ["support", "[b]"]
    assert cli("adapter", "unload", "support").stdout == "unloaded support\n"
    assert lines(cli("adapter", "unload", "support", "--json")) == [{"unloaded": "support"}]
    nothing = manager_pb.ListAdaptersResponse()
    threaded_manager.scripts.unary["ListAdapters"] = [lambda request, context: succeed_with(nothing, request, context)]
    assert cli("adapter", "list").stdout == "no adapter is loaded\n"


def test_unpin_and_pins(cli: Cli, threaded_manager: ThreadedManager) -> None:
    assert cli("unpin", "system").stdout == "unpinned system\n"
    assert lines(cli("unpin", "system", "--json")) == [{"unpinned": "system"}]
    assert [one.name for one in threaded_manager.scripts.of("UnpinPrefix")] == ["system", "system"]
    plain, (document,) = cli("pins"), lines(cli("pins", "--json"))
    assert [line.split() for line in plain.stdout.splitlines()[:3]] == [
        ["pin", "tokens", "blocks", "held", "shared", "under"],
        ["system", "70", "4", "3"],
        ["[b]", "16", "1", "1", "tenant=", "salt=s", "adapter=[l]", "revision=r1"],
    ]
    assert "25 blocks in all" in plain.stdout
    assert (document["max_blocks"], document["pins"][1]["name"]) == (25, "[b]")
    assert [one["keys"] for one in document["pins"]] == [
        None, {"cache_salt": "s", "tenant": "", "lora_id": "[l]", "lora_revision": "r1"},
    ]  # fmt: skip
    nothing = manager_pb.ListPinnedPrefixesResponse(max_blocks=25)
    threaded_manager.scripts.unary["ListPinnedPrefixes"] = [
        lambda request, context: succeed_with(nothing, request, context)
    ]
    assert cli("pins").stdout == "nothing is pinned; pins may name 25 blocks\n"
    threaded_manager.scripts.unary["ListPinnedPrefixes"] = [
        partial(succeed_with, manager_pb.ListPinnedPrefixesResponse())
    ]
    assert "no executor is ready" in cli("pins").stdout


def test_text_for_a_model_without_a_tokenizer_is_refused_with_what_to_give(
    cli: Cli, threaded_manager: ThreadedManager
) -> None:
    bare = pb.GetModelResponse(name="sim", max_model_len=128, vocab_size=256)
    threaded_manager.scripts.unary["GetModel"] = [partial(succeed_with, bare)]
    for command, advice in (("generate", "--token-ids 1,2,3"), ("chat", "`kvplane generate --token-ids 1,2,3`")):
        result = cli(command, *(["hello"] if command == "generate" else []), stdin="hello")
        assert result.exit_code == 1
        assert advice in " ".join(result.stderr.split())
    assert threaded_manager.scripts.of("Generate") == []


def test_generate_takes_token_ids(cli: Cli, threaded_manager: ThreadedManager) -> None:
    assert cli("generate", "--token-ids", "1, 2 3").exit_code == 0
    assert list(threaded_manager.scripts.of("Generate")[0].token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["--stream", "--no-stream"])
def test_generate_without_a_tokenizer_prints_token_ids(cli: Cli, threaded_manager: ThreadedManager, mode: str) -> None:
    plain = pb.GetModelResponse(name="sim", has_tokenizer=False)
    threaded_manager.scripts.unary["GetModel"] = [lambda request, context: succeed_with(plain, request, context)]

    result = cli("generate", "--token-ids", "1", "-n", "3", mode)

    assert (result.exit_code, result.stdout.split()) == (0, [str(byte) for byte in TEXT.encode()[:3]])


def test_generate_json_is_one_line_a_chunk(cli: Cli) -> None:
    first, second = lines(cli("generate", "a", "--json", "-n", "2", "--request-id", "r", "--logprobs", "1"))

    assert first == {
        "request_id": "r",
        "text": "",
        "token_ids": [206],
        "logprobs": [{"logprob": -0.5, "top": [{"token_id": 206, "logprob": -0.5}]}],
        "finish_reason": None,
        "stop_match": None,
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "cached_tokens": 3},
        "index": 0,
    }
    assert (second["text"], second["finish_reason"], second["usage"]["completion_tokens"]) == ("Ω", "length", 2)


def test_generate_json_without_stream_is_one_document(cli: Cli) -> None:
    (document,) = lines(cli("generate", "a", "--json", "--no-stream"))

    assert list(document) == [
        "request_id", "text", "token_ids", "logprobs", "finish_reason", "stop_match", "usage", "index",
    ]  # fmt: skip
    assert (document["text"], document["finish_reason"]) == (TEXT, "length")


@pytest.mark.parametrize("mode", ["", "--no-stream", "--json"])
def test_generate_aborted_by_somebody_says_so(cli: Cli, threaded_manager: ThreadedManager, mode: str) -> None:
    threaded_manager.scripts.generate = [aborted]
    result = cli("generate", "a", *([mode] if mode else []))

    assert result.exit_code == 1
    if mode == "--json":
        assert (lines(result)[-1]["finish_reason"], result.stderr) == ("abort", "")
    else:
        assert "aborted: somebody ended the request" in result.stderr
        assert TEXT in result.stdout


def test_generate_survives_a_break_and_says_so(cli: Cli, threaded_manager: ThreadedManager) -> None:
    threaded_manager.scripts.generate = [break_after(4), answer]

    result = cli("generate", "a")

    assert (result.exit_code, result.stdout) == (0, TEXT + "\n")
    assert "connection lost, trying again" in result.stderr


def test_generate_whose_server_has_no_executor_for_a_moment_speaks_of_no_lost_connection(
    cli: Cli, threaded_manager: ThreadedManager
) -> None:
    nobody_computes = failing_stream(grpc.StatusCode.UNAVAILABLE, "none is ready", "NO_EXECUTOR")
    threaded_manager.scripts.generate = [nobody_computes, answer]

    result = cli("generate", "a")

    assert (result.exit_code, result.stdout) == (0, TEXT + "\n")
    assert "the server can not go on yet, trying again" in result.stderr
    assert "connection lost" not in result.stderr


def test_generate_json_tells_of_a_break_in_json(cli: Cli, threaded_manager: ThreadedManager) -> None:
    threaded_manager.scripts.generate = [break_after(4), answer]

    result = cli("generate", "a", "--json")

    assert (result.exit_code, lines(result)[-1]["finish_reason"]) == (0, "length")
    (notice,) = [json.loads(line) for line in result.stderr.splitlines()]
    assert (notice["event"], notice["pause"] > 0) == ("retrying", True)


def test_error_is_explained_without_a_traceback(cli: Cli, threaded_manager: ThreadedManager) -> None:
    refusal = failing_stream(grpc.StatusCode.INVALID_ARGUMENT, "logprobs: expected [0, 5], got 9", "BAD", logprobs="9")
    threaded_manager.scripts.generate = [refusal]

    plain = cli("generate", "a", "--logprobs", "9")
    as_json = cli("generate", "a", "--logprobs", "9", "--json")

    assert (plain.exit_code, plain.stdout) == (1, "")
    assert plain.stderr == "error: logprobs: expected [0, 5], got 9\nBAD\n"
    assert as_json.exit_code == 1
    assert json.loads(as_json.stderr) == {
        "error": {
            "code": "INVALID_ARGUMENT",
            "reason": "BAD",
            "message": "logprobs: expected [0, 5], got 9",
            "metadata": {"logprobs": "9"},
            "retry_delay": None,
        }
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "a"], ["stats"], ["requests"], ["blocks"], ["events"], ["executors"], ["abort", "x"],
        ["model", "info"], ["reset-cache"], ["stats", "--wait", "0.2"], ["switch-executor", "x"],
    ],
)  # fmt: skip
def test_unreachable_server_exits_with_3(nobody: Cli, arguments: list[str]) -> None:
    plain, as_json = nobody(*arguments), nobody(*arguments, "--json")

    assert (plain.exit_code, as_json.exit_code) == (3, 3)
    assert "kvplane up" in plain.stderr
    assert json.loads(as_json.stderr)["error"]["code"] == "UNAVAILABLE"


def test_wait_that_ends_without_an_executor_says_that_the_manager_is_there(
    cli: Cli, threaded_manager: ThreadedManager
) -> None:
    no_model = fail(grpc.StatusCode.UNAVAILABLE, "none is ready", "NO_EXECUTOR")
    threaded_manager.scripts.unary["GetModel"] = [no_model]
    result = cli("generate", "a", "--wait", "0.3")
    assert result.exit_code == 3
    told = " ".join(result.stderr.split())
    assert "answers but is not ready" in told
    assert "`kvplane executors` shows" in told
    assert "kvplane up" not in told


@pytest.mark.parametrize(
    ("speaks_tls", "options", "advice"),
    [
        (True, [], "but not in plain text: with --tls or --tls-ca"),
        (True, ["--tls"], "that nobody vouches for here: --tls-ca FILE"),
        (False, ["--tls"], "but without TLS: leave out --tls"),
    ],
    ids=["plain to TLS", "not trusted", "TLS to plain"],
)
def test_server_that_is_there_but_not_as_asked_says_what_to_change(
    tmp_path: Path, speaks_tls: bool, options: list[str], advice: str
) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    if speaks_tls:
        made = make_certificate(tmp_path)
        pair = (made.key.read_bytes(), made.certificate.read_bytes())
        port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        result = Cli(f"localhost:{port}")("stats", *options)
    finally:
        server.stop(None)
    assert result.exit_code == 3
    assert advice in " ".join(result.stderr.split())


def test_server_without_executor_exits_with_3_and_says_that_it_is_there(
    cli: Cli, threaded_manager: ThreadedManager
) -> None:
    threaded_manager.scripts.unary["GetModel"] = [fail(grpc.StatusCode.UNAVAILABLE, "none is ready", "NO_EXECUTOR")]

    result = cli("generate", "a")

    assert result.exit_code == 3
    assert "answers but is not ready: --wait" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["generate", ""], ["generate", "a", "--token-ids", "1"], ["blocks", "--filter", "odd"], ["abort"], ["nonsense"]],
)
def test_wrong_usage_exits_with_2(cli: Cli, arguments: list[str]) -> None:
    plain, as_json = cli(*arguments), cli(*arguments, "--json")

    assert (plain.exit_code, as_json.exit_code) == (2, 2)
    assert (plain.stdout, as_json.stdout) == ("", "")
    assert plain.stderr.startswith("Usage: ")
    error = json.loads(as_json.stderr)["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert error["message"].split()[0] in plain.stderr


def test_wrong_usage_after_double_dash_is_no_json(cli: Cli) -> None:
    """There --json is a prompt like any other."""
    assert cli("generate", "-n", "0", "--", "--json").stderr.startswith("Usage: ")


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "50051",
        "http://localhost:50051",
        "localhost:",
        ":50051",
        "localhost:0",
        "localhost:65536",
        "localhost:fifty",
        "localhost:50051/x",
        "::1:50051",
        "[::1]",
        "my host:1",
        "unix:",
    ],
)
def test_server_that_is_no_address_is_wrong_usage(nobody: Cli, address: str) -> None:
    result = nobody("stats", "--server", address, columns=400)

    assert result.exit_code == 2
    assert f"expected host:port such as localhost:50051, got {address!r}" in result.stderr


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "[::1]:1", "dns:///localhost:1", "unix:/nowhere"])
def test_server_that_is_an_address_is_asked(nobody: Cli, address: str) -> None:
    assert nobody("stats", "--server", address).exit_code == 3


@pytest.mark.parametrize(
    ("flags", "expected", "got"),
    [
        (["--temperature", "-1"], "a number, at least 0", "-1.0"),
        (["--temperature", "nan"], "a number, at least 0", "nan"),
        (["--temperature", "inf"], "a number, at least 0", "inf"),
        (["--temperature", "hot"], "a number, at least 0", "'hot'"),
        (["--top-k", "-1"], "a whole number, at least 0", "-1"),
        (["--top-k", "many"], "a whole number, at least 0", "'many'"),
        (["--top-p", "2"], "a number, above 0 and at most 1", "2.0"),
        (["--top-p", "0"], "a number, above 0 and at most 1", "0.0"),
        (["--min-p", "1.5"], "a number, 0 to 1", "1.5"),
        (["--repetition-penalty", "0"], "a number, 0.0625 to 16", "0.0"),
        (["--presence-penalty", "3"], "a number, -2 to 2", "3.0"),
        (["--frequency-penalty", "-3"], "a number, -2 to 2", "-3.0"),
        (["--seed", "-1"], "a whole number, at least 0", "-1"),
        (["--seed", str(2**64)], "a whole number, 0 to 18446744073709551615", str(2**64)),
        (["--logprobs", "-1"], "a whole number, at least 0", "-1"),
        (["-n", "0"], "a whole number, at least 1", "0"),
        (["-n", str(2**31)], "a whole number, 1 to 2147483647", str(2**31)),
        (["--min-tokens", "-1"], "a whole number, at least 0", "-1"),
        (["--min-tokens", "3", "-n", "2"], "at most --max-tokens (2)", "3"),
        (["--stop", ""], "1 to 256 characters", "0"),
        (["--stop", "x"] * 17, "at most 16 of them", "17"),
        (["--stop-token-id", "-1"], "a whole number, at least 0", "-1"),
        (["--stop-token-id", "1"] * 65, "at most 64 of them", "65"),
        (["--logit-bias", "x"], 'ID:X such as "42:-5"', "'x'"),
        (["--logit-bias", "3:101"], 'ID:X such as "42:-5"', "'3:101'"),
        (["--priority", str(2**31)], "a whole number, -2147483648 to 2147483647", str(2**31)),
        (["--retention-priority", "101"], "a whole number, -100 to 100", "101"),
        (["--retention", "512=80"], "START:STOP=PRIORITY or decode=PRIORITY", "'512=80'"),
        (["--retention", ":4=101"], "START:STOP=PRIORITY or decode=PRIORITY", "':4=101'"),
        (["--retention", "4:4=1"], "START below STOP", "'4:4=1'"),
        (["--retention", "512:10=5"], "START below STOP", "'512:10=5'"),
        (["--retention", "-4:4=1"], "START below STOP, both in 0 to 2147483647", "'-4:4=1'"),
        (["--retention", "decode=1/nan"], "START:STOP=PRIORITY or decode=PRIORITY", "'decode=1/nan'"),
        (["--retention", "decode=1/2147484"], "START:STOP=PRIORITY or decode=PRIORITY", "'decode=1/2147484'"),
        (["--retention", "decode=1"] * 2, "decode= once", "'decode=1'"),
        (["--retention", ":4=1"] * 65, "at most 64 ranges", "65"),
        (["--cache-salt", "x" * 257], "0 to 256 characters", "257"),
        (["--tenant", "x" * 257], "0 to 256 characters", "257"),
        (["--deadline", "0"], "a number, above 0", "0.0"),
        (["--wait", "-1"], "a number, at least 0", "-1.0"),
        (["-n", "٣"], "a whole number, at least 1", "'٣'"),
        (["--temperature", "٣"], "a number, at least 0", "'٣'"),
        (["--logit-bias", "٣:1"], 'ID:X such as "42:-5"', "'٣:1'"),
        (["--logit-bias", "3:١"], 'ID:X such as "42:-5"', "'3:١'"),
        (["--retention", "٣:=1"], "START:STOP=PRIORITY or decode=PRIORITY", "'٣:=1'"),
        (["--retention", "decode=١"], "START:STOP=PRIORITY or decode=PRIORITY", "'decode=١'"),
        (["--retention", "decode=1/١"], "START:STOP=PRIORITY or decode=PRIORITY", "'decode=1/١'"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_value_out_of_range_is_wrong_usage_told_in_one_form(
    nobody: Cli, command: str, flags: list[str], expected: str, got: str
) -> None:
    result = nobody(command, *(["a"] if command == "generate" else []), *flags, stdin="hi", columns=400)

    told = " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"expected {expected}" in told
    assert f", got {got}; " in told
    assert flags[0] in told


@pytest.mark.parametrize(("ids", "wrong"), [("-1", "-1"), (f"1,2,{2**31}", f"{2**31}"), ("1,2,-3", "-3")])
def test_token_ids_out_of_range_are_named(nobody: Cli, ids: str, wrong: str) -> None:
    result = nobody("generate", "--token-ids", ids, columns=400)

    assert result.exit_code == 2
    assert f"expected token ids in 0 to 2147483647, got {wrong}; " in result.stderr


@pytest.mark.parametrize("ids", ["one", ",", "٣"])
def test_token_ids_that_are_none_are_wrong_usage(nobody: Cli, ids: str) -> None:
    result = nobody("generate", "--token-ids", ids, columns=400)

    assert result.exit_code == 2
    assert f"expected token ids such as \"1,2,3\", got '{ids}'; " in result.stderr


@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_deadline_that_passes_is_the_servers_failure(
    cli: Cli, threaded_manager: ThreadedManager, mode: list[str]
) -> None:
    threaded_manager.scripts.generate = [hang_after(1, lambda: None)]

    result = cli("generate", "a", "--deadline", "0.01", *mode)

    assert result.exit_code == 1
    if mode:
        assert json.loads(result.stderr)["error"]["code"] == "DEADLINE_EXCEEDED"
    else:
        assert "error: --deadline: expected the output to end in time, got no end" in result.stderr
        assert "give it longer" in result.stderr


def test_generate_without_a_limit_asks_for_256_tokens(cli: Cli, threaded_manager: ThreadedManager) -> None:
    assert cli("generate", "a").exit_code == 0
    assert cli("generate", "a", "--min-tokens", "300").exit_code == 0
    assert cli("generate", "a", "-n", "9000").exit_code == 0
    asked = [request.stopping.max_tokens for request in threaded_manager.scripts.of("Generate")]
    assert asked == [256, 300, 9000]


def test_generate_that_ends_at_the_default_limit_says_so(cli: Cli, threaded_manager: ThreadedManager) -> None:
    async def long(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for message in answer(request, context):
            if message.finish_reason:
                message.usage.completion_tokens = 256
            yield message

    threaded_manager.scripts.generate = [long]

    assert cli("generate", "a").stderr == "ended after 256 tokens; -n N sets another limit\n"
    assert cli("generate", "a", "-n", "256").stderr == ""
    assert cli("generate", "a", "--json").stderr == ""


def test_stats_shows_the_pool_and_prints_json(cli: Cli) -> None:
    plain, (document,) = cli("stats"), lines(cli("stats", "--json"))

    assert "4 of 10 used (40%), 5 cached, 2 pinned, 16 tokens each" in plain.stdout
    assert "25 of 100 prompt tokens found (25%)" in plain.stdout
    assert document["state"] == "serving"
    assert document["pool"] == {
        "block_size": 16, "num_blocks": 10, "free_blocks": 6, "cached_blocks": 5, "kv_epoch": 9, "num_host_blocks": 20,
        "used_host_blocks": 7, "pinned_blocks": 2, "group_block_sizes": [16],
    }  # fmt: skip
    assert (document["swapped_out"], document["settings"]["preemption_mode"]) == (4, "swap")
    assert "6, and 2 rescheduled; 4 swapped out, 3 in, 7 of 20 host blocks used" in plain.stdout
    assert document["settings"]["max_waiting"] == 64
    assert "prefix caching on, tenants apart" in plain.stdout
    assert "acme: 1 running, 2 waiting, 340 served" in plain.stdout
    assert "(none named): 0 running, 1 waiting " in plain.stdout
    assert document["tenants"][0] == {
        "tenant": "acme", "requests_waiting": 2, "requests_running": 1, "served": 340.25,
    }  # fmt: skip


def test_requests_shows_block_tables_of_every_page(cli: Cli, threaded_manager: ThreadedManager) -> None:
    plain, (document,) = cli("requests", "--all"), lines(cli("requests", "r1", "--json"))

    assert all(f"r{index}" in plain.stdout for index in range(5))
    assert "1-3,7" in plain.stdout
    assert "acme" in plain.stdout
    assert document["requests"][0]["tenant"] == "acme"
    assert [info["request_id"] for info in document["requests"]] == ["r1"]
    assert document["requests"][0]["block_table"] == [1, 2, 3, 7]
    asked = threaded_manager.scripts.of("ListRequests")
    assert (asked[0].include_finished, asked[-1].include_finished) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone"], "no request gone; --all adds those that finished lately\n"),
        (["gone", "--all"], "no request gone\n"),
        (["[red]"], "no request [red]; --all adds those that finished lately\n"),
    ],
)
def test_requests_names_the_one_that_is_not_there(cli: Cli, arguments: list[str], said: str) -> None:
    result = cli("requests", *arguments)

    assert (result.exit_code, result.stdout) == (0, said)


def test_blocks_trace_tells_a_blocks_life(cli: Cli, threaded_manager: ThreadedManager) -> None:
    plain, (document,) = cli("blocks", "trace", "12"), lines(cli("blocks", "trace", "12", "--json"))

    assert "earlier moments are not kept any more" in plain.stdout
    assert [line.split() for line in plain.stdout.splitlines()[2:]] == [
        ["3", "allocated", "r1"], ["8", "filled", "4", "abcd"],
    ]  # fmt: skip
    assert (document["block_id"], document["is_whole"]) == (12, False)
    assert document["records"][0] == {
        "order": 3, "moment": "allocated", "request_id": "r1", "step_id": None, "block_hash": None, "group": 0,
        "keys": None,
    }  # fmt: skip
    assert document["num_groups"] == 1
    assert [one.block_id for one in threaded_manager.scripts.of("TraceBlock")] == [12, 12]
    assert threaded_manager.scripts.of("ListBlocks") == [], "the pool is not listed for it"
    assert cli("blocks", "trace", "0").exit_code == 2


def test_blocks_trace_of_a_model_with_several_groups_names_each(cli: Cli, threaded_manager: ThreadedManager) -> None:
    several = manager_pb.TraceBlockResponse(
        records=[
            manager_pb.BlockRecord(order=3, moment=manager_pb.BLOCK_MOMENT_FREED, request_id="r1", group=2),
            manager_pb.BlockRecord(order=9, moment=manager_pb.BLOCK_MOMENT_ALLOCATED, request_id="r2"),
        ],
        is_whole=True,
        num_groups=3,
    )
    threaded_manager.scripts.unary["TraceBlock"] = [lambda request, context: succeed_with(several, request, context)]
    plain, (document,) = cli("blocks", "trace", "12"), lines(cli("blocks", "trace", "12", "--json"))

    assert [line.split() for line in plain.stdout.splitlines()] == [
        ["order", "moment", "group", "request", "step", "hash"],
        ["3", "freed", "2", "r1"], ["9", "allocated", "0", "r2"],
    ]  # fmt: skip
    assert [record["group"] for record in document["records"]] == [2, 0]
    assert document["num_groups"] == 3


def test_blocks_trace_tells_whom_a_first_block_is_shared_with(cli: Cli, threaded_manager: ThreadedManager) -> None:
    keys = manager_pb.KvBlockKeys(tenant="[b]", cache_salt="s\x1b")
    told = manager_pb.TraceBlockResponse(
        records=[
            manager_pb.BlockRecord(order=3, moment=manager_pb.BLOCK_MOMENT_ALLOCATED, request_id="r1"),
            manager_pb.BlockRecord(order=9, moment=manager_pb.BLOCK_MOMENT_HASHED, block_hash=b"\xab", keys=keys),
        ],
        is_whole=True,
        num_groups=1,
    )
    threaded_manager.scripts.unary["TraceBlock"] = [lambda request, context: succeed_with(told, request, context)]
    plain, (document,) = cli("blocks", "trace", "12"), lines(cli("blocks", "trace", "12", "--json"))

    assert [line.split() for line in plain.stdout.splitlines()] == [
        ["order", "moment", "request", "step", "hash", "shared", "under"],
        ["3", "allocated", "r1"], ["9", "hashed", "ab", "tenant=[b]", "salt=s\\x1b"],
    ]  # fmt: skip
    assert [record["keys"] for record in document["records"]] == [
        None, {"cache_salt": "s\x1b", "tenant": "[b]", "lora_id": "", "lora_revision": ""},
    ]  # fmt: skip


def test_events_are_lines_or_json_until_the_stream_ends(cli: Cli, threaded_manager: ThreadedManager) -> None:
    plain, result = cli("events"), cli("events", "--since", "log:4", "--token-ids", "--keys", "--json")

    assert (plain.exit_code, result.exit_code) == (1, 1)
    assert plain.stdout.splitlines() == [
        "       4 cleared", "       4 stored  block 7      aa first tenant= salt=s\\x1b adapter=a revision=1",
        "       5 removed block 7      aa",
    ]  # fmt: skip
    assert "too slow" in plain.stderr
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(one["next"], one["is_snapshot"]) for one in documents] == [("log:5", True), ("log:6", False)]
    keys = {"cache_salt": "s\x1b", "tenant": "", "lora_id": "a", "lora_revision": "1"}
    assert documents[0]["events"][1]["keys"] == keys
    assert documents[1]["events"] == [
        {
            "event": "removed", "sequence": 5, "block_id": 7, "block_hash": "aa", "content_id": 1, "group": 0,
            "medium": "device",
        }
    ]  # fmt: skip
    asked = threaded_manager.scripts.of("WatchKvEvents")
    assert [(one.log_id, one.from_sequence, one.include_token_ids, one.include_keys) for one in asked] == [
        ("", 0, False, False),
        ("log", 4, True, True),
    ]


@pytest.mark.parametrize("since", ["log", ":4", "log:0", "log:x", "log:٣"])
def test_events_since_that_is_no_position_is_wrong_usage(cli: Cli, since: str) -> None:
    assert cli("events", "--since", since).exit_code == 2


def test_blocks_draws_a_map_a_list_and_json(cli: Cli) -> None:
    drawn = cli("blocks").stdout.splitlines()
    listed = cli("blocks", "--list", "--filter", "cached").stdout
    (document,) = lines(cli("blocks", "--filter", "used", "--json"))

    assert drawn[0] == "      1 █▓?░"
    assert drawn[1] == "     65      ·"
    assert drawn[-1] == "5 blocks: 3 used, 2 free, 3 cached"
    assert "01" * 16 in listed
    assert "used, cached, provisional" in listed
    assert [block["block_id"] for block in document["blocks"]] == [1, 2, 3]
    assert document["blocks"][1] == {
        "block_id": 2,
        "ref_cnt": 1,
        "block_hash": None,
        "provisional": False,
        "group": 0,
    }


def test_blocks_lines_that_are_alike_are_told_of_and_not_drawn(cli: Cli, threaded_manager: ThreadedManager) -> None:
    """An idle pool of a GPU is thousands of lines."""
    infos = [manager_pb.BlockInfo(block_id=block_id, ref_cnt=int(block_id == 400)) for block_id in range(1, 4_096)]
    response = manager_pb.ListBlocksResponse(blocks=infos)
    threaded_manager.scripts.unary["ListBlocks"] = [partial(succeed_with, response)]
    drawn = cli("blocks").stdout.splitlines()
    assert drawn[:-2] == [
        "      1 " + "·" * 64,
        "      … 5 more lines like it, to 321",
        "    385 " + "·" * 15 + "▓" + "·" * 48,
        "    449 " + "·" * 64,
        "      … 55 more lines like it, to 3969",
        "   4033 " + "·" * 63,
    ]
    assert drawn[-1] == "4095 blocks: 1 used, 4094 free, 0 cached"


def test_executors_and_model_info_describe_the_server(cli: Cli) -> None:
    (executors,), (model,) = lines(cli("executors", "--json")), lines(cli("model", "info", "--json"))

    assert "ex-1" in cli("executors").stdout
    assert executors["executors"][0]["state"] == "active"
    assert "128 tokens" in cli("model", "info").stdout
    assert (model["name"], model["has_chat_template"]) == ("tiny", True)


def test_abort_and_reset_cache_say_what_they_did(cli: Cli, threaded_manager: ThreadedManager) -> None:
    assert cli("abort", "x").stdout == "aborted x\n"
    assert lines(cli("reset-cache", "--json")) == [{"blocks_forgotten": 4}]
    threaded_manager.scripts.unary["Abort"] = [fail(grpc.StatusCode.NOT_FOUND, "no request x", "REQUEST_NOT_FOUND")]
    assert cli("abort", "x").exit_code == 1


def test_switch_executor_says_who_is_active_and_who_stands_by(cli: Cli, threaded_manager: ThreadedManager) -> None:
    assert cli("switch-executor", "ex-2").stdout == "ex-2 is active; ex-1 stands by\n"
    assert lines(cli("switch-executor", "ex-2", "--json")) == [{"active": "ex-2", "previous": "ex-1"}]
    refusal = fail(grpc.StatusCode.FAILED_PRECONDITION, "not ready", "EXECUTOR_NOT_READY")
    threaded_manager.scripts.unary["SwitchExecutor"] = [refusal]
    refused = cli("switch-executor", "ex-2")
    assert refused.exit_code == 1
    assert "not ready" in refused.stderr


HOSTILE = "\x1b]0;pwn\x07\x1b[2J\x9b1A\u202e[b]\r\nx"
SHOWN = r"\x1b]0;pwn\x07\x1b[2J\x9b1A\u202e[b]\r\nx"
RUNNING = {"status": manager_pb.REQUEST_STATUS_RUNNING}
SERVING = {"state": manager_pb.MANAGER_STATE_SERVING}
ACTIVE = {"state": registry_pb.EXECUTOR_STATE_ACTIVE}


@pytest.mark.parametrize(
    ("command", "method", "response"),
    [
        (["pins"], "ListPinnedPrefixes", manager_pb.ListPinnedPrefixesResponse(pins=[{"name": HOSTILE}])),
        (["pins"], "ListPinnedPrefixes", manager_pb.ListPinnedPrefixesResponse(pins=[{"keys": {"lora_id": HOSTILE}}])),
        (["adapter", "list"], "ListAdapters", manager_pb.ListAdaptersResponse(adapters=[{"name": HOSTILE}])),
        (["adapter", "load", "x", "y"], "LoadAdapter", manager_pb.LoadAdapterResponse(adapter={"name": HOSTILE})),
        (["requests"], "ListRequests", manager_pb.ListRequestsResponse(requests=[{"adapter": HOSTILE, **RUNNING}])),
        (["pin", "x", "text"], "PinPrefix", manager_pb.PinPrefixResponse(pin={"name": HOSTILE})),
        (["requests"], "ListRequests", manager_pb.ListRequestsResponse(requests=[{"request_id": HOSTILE, **RUNNING}])),
        (["requests"], "ListRequests", manager_pb.ListRequestsResponse(requests=[{"tenant": HOSTILE, **RUNNING}])),
        (["stats"], "GetStats", manager_pb.GetStatsResponse(tenants=[{"tenant": HOSTILE}], **SERVING)),
        (["stats"], "GetStats", manager_pb.GetStatsResponse(settings={"policy": HOSTILE}, **SERVING)),
        (
            ["executors"],
            "ListExecutors",
            registry_pb.ListExecutorsResponse(executors=[{"executor_id": HOSTILE, **ACTIVE}]),
        ),
        (
            ["executors"],
            "ListExecutors",
            registry_pb.ListExecutorsResponse(executors=[{"last_error": HOSTILE, **ACTIVE}]),
        ),
        (
            ["blocks", "trace", "1"],
            "TraceBlock",
            manager_pb.TraceBlockResponse(
                records=[{"moment": manager_pb.BLOCK_MOMENT_ALLOCATED, "request_id": HOSTILE}]
            ),
        ),
        (["model", "info"], "GetModel", pb.GetModelResponse(name=HOSTILE)),
    ],
)
def test_names_that_others_gave_are_shown_not_obeyed(
    cli: Cli, threaded_manager: ThreadedManager, command: list[str], method: str, response: Any
) -> None:
    threaded_manager.scripts.unary[method] = [lambda request, context: succeed_with(response, request, context)]
    plain, document = cli(*command, columns=400), cli(*command, "--json")

    assert (plain.exit_code, document.exit_code) == (0, 0)
    assert SHOWN in plain.stdout
    assert HOSTILE in _strings(json.loads(document.stdout)), "JSON keeps what it was"
    for stdout in (plain.stdout, document.stdout):
        assert not set(HOSTILE) - set(SHOWN) - {"\n"} & set(stdout)


def _strings(value: Any) -> set[str]:
    """All strings in a JSON value."""
    if isinstance(value, dict | list):
        return set().union(*map(_strings, value.values() if isinstance(value, dict) else value))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("command", [["stats"], ["generate", "a"]])
def test_errors_are_shown_not_obeyed_and_keep_their_lines(
    cli: Cli, threaded_manager: ThreadedManager, command: list[str]
) -> None:
    threaded_manager.scripts.unary["GetStats"] = [fail(grpc.StatusCode.NOT_FOUND, "no \x1b[2J\x9b\nhere", "X")]
    threaded_manager.scripts.generate = [failing_stream(grpc.StatusCode.NOT_FOUND, "no \x1b[2J\x9b\nhere", "X")]

    assert r"no \x1b[2J\x9b" + "\nhere" in cli(*command).stderr


def test_version_prints_versions() -> None:
    (document,) = lines(CliRunner().invoke(app, ["version", "--json"]))

    assert set(document) == {"kvplane", "python", "grpc"}
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == document["kvplane"]


def test_chat_answers_what_comes_on_stdin(cli: Cli, threaded_manager: ThreadedManager) -> None:
    result = cli("chat", "--system", "s", "-t", "0", stdin="hi\nthere\n")

    assert (result.exit_code, result.stdout) == (0, TEXT + "\n")
    (request,) = threaded_manager.scripts.of("Generate")
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("system", "s"), ("user", "hi\nthere")]
    assert lines(cli("chat", "--json", stdin="hi"))[-1]["finish_reason"] == "length"
    assert cli("chat", stdin="").exit_code == 1


def test_chat_needs_a_template(cli: Cli, threaded_manager: ThreadedManager) -> None:
    plain = pb.GetModelResponse(name="base", has_chat_template=False)
    threaded_manager.scripts.unary["GetModel"] = [lambda request, context: succeed_with(plain, request, context)]

    result = cli("chat", stdin="hi")

    assert result.exit_code == 1
    assert "no chat template" in result.stderr


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, cli: Cli, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = cli.start(*arguments, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.shown = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, expected: str) -> None:
        """Reads until a text has been shown since the last one."""
        while expected not in self.shown:
            ready, _, _ = select.select([self._master], [], [], 60)
            assert ready, f"expected {expected!r}, got {self.shown!r}"
            self.shown += os.read(self._master, 65536).decode()
        self.shown = self.shown.partition(expected)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._master)


@pytest.fixture
def terminal(cli: Cli) -> Iterator[Terminal]:
    """A chat on a terminal."""
    opened = Terminal(cli, "chat", "--temperature", "0")
    yield opened
    opened.close()


def test_chat_on_a_terminal_remembers_resets_and_leaves(terminal: Terminal, threaded_manager: ThreadedManager) -> None:
    terminal.until(">>> ")
    terminal.send("one\n")
    terminal.until(TEXT)
    terminal.until(">>> ")
    terminal.send("two\n")
    terminal.until(TEXT)
    terminal.until(">>> ")
    terminal.send("/what\n")
    terminal.until("unknown command /what")
    terminal.until(">>> ")
    terminal.send("/reset\n")
    terminal.until(">>> ")
    terminal.send("three\n")
    terminal.until(TEXT)
    terminal.until(">>> ")
    terminal.send("/exit\n")

    assert terminal.process.wait(60) == 0
    turns = [[turn.content for turn in request.chat.messages] for request in threaded_manager.scripts.of("Generate")]
    assert turns == [["one"], ["one", TEXT, "two"], ["three"]]


def test_interrupt_in_chat_stops_the_answer_then_leaves(terminal: Terminal, threaded_manager: ThreadedManager) -> None:
    cancelled = threading.Event()
    threaded_manager.scripts.generate = [hang_after(8, cancelled.set)]
    terminal.until(">>> ")
    terminal.send("one\n")
    terminal.until(TEXT[:6])
    os.kill(terminal.process.pid, signal.SIGINT)
    assert cancelled.wait(60)
    terminal.until("stopped")
    terminal.until(">>> ")
    os.kill(terminal.process.pid, signal.SIGINT)
    # A signal between the prompt and Python's read is seen when the read returns: this makes it return.
    terminal.send("\n")

    assert terminal.process.wait(60) == 130


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupt_aborts_the_request_on_the_server(cli: Cli, threaded_manager: ThreadedManager, as_json: bool) -> None:
    cancelled = threading.Event()
    threaded_manager.scripts.generate = [hang_after(2, cancelled.set)]
    process = cli.start(
        "generate", "a", *(["--json"] if as_json else []), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1) != ""

    process.send_signal(signal.SIGINT)
    with process:
        assert process.stderr is not None
        rest, stderr = process.stdout.read(), process.stderr.read()

    assert process.returncode == 130
    assert cancelled.wait(60)
    assert rest.endswith("\n"), "what is said of it begins a line"
    assert "Traceback" not in stderr
    if as_json:
        assert json.loads(stderr)["error"]["code"] == "CANCELLED"
    else:
        assert stderr == "error: interrupted\n"


def test_reader_that_goes_away_causes_no_traceback(cli: Cli) -> None:
    process = cli.start("generate", "a", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()

    assert process.wait(60) == 1
    assert "Traceback" not in stderr


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, by the words that call it."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ELSEWHERE = {("replay",), ("calibrate",)}  # their help is that of the manager's own programs
COMMANDS = {" ".join(path): command for path, command in commands(get_command(app)) if path not in ELSEWHERE}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_cuts_nothing(name: str) -> None:
    command = COMMANDS[name]
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"}).stdout

    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    words = re.split(r"[│,\s]+", shown)
    for parameter in command.params:
        names = [text for text in (*parameter.opts, *parameter.secondary_opts) if text.startswith("-")]
        assert all(text in words for text in names), f"{names}: {shown}"
    # Where help is not filled anew, a line that is too long would leave a ragged one.
    _, *paragraphs = inspect.cleandoc(command.help).split("\n\n")
    assert all(len(text) <= 78 for paragraph in paragraphs for text in paragraph.splitlines())
    if name not in ("", "version", "model"):
        assert f"  kvplane {name}" in shown, "an example, indented"


def test_chat_offers_what_generate_does() -> None:
    flags = {
        name: {text for parameter in COMMANDS[name].params for text in parameter.opts if text.startswith("--")}
        for name in ("generate", "chat")
    }
    # A conversation has many requests, each a chat, streamed, of text.
    assert flags["generate"] - flags["chat"] == {"--chat", "--token-ids", "--stream", "--request-id", "--num-outputs"}
    assert flags["chat"] - flags["generate"] == set()


def test_chat_passes_every_flag(cli: Cli, threaded_manager: ThreadedManager) -> None:
    result = cli(
        "chat", "-t", "0", "--logit-bias", "3:-1.5", "--logprobs", "2", "-n", "5", "--min-tokens", "1",
        "--stop-token-id", "9", "--ignore-eos", "--include-stop", "--priority", "-2", "--retention-priority", "9",
        "--retention", "decode=3", "--cache-salt", "salt", "--tenant", "t", "--deadline", "60", "--usage", stdin="hi",
    )  # fmt: skip

    assert result.exit_code == 0, result.stderr
    (request,) = threaded_manager.scripts.of("Generate")
    request.request_id = ""
    assert request == pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")]),
        sampling=pb.SamplingParams(temperature=0, logit_bias={3: -1.5}, logprobs=2),
        stopping=pb.StoppingParams(
            max_tokens=5, min_tokens=1, stop_token_ids=[9], ignore_eos=True, include_stop=True
        ),
        priority=-2, retention_priority=9, cache_salt="salt", tenant="t",
        retention=pb.Retention(decode=pb.RetentionLevel(priority=3)),
    )  # fmt: skip
    assert "5 completion tokens" in result.stderr


def test_chat_aborted_by_somebody_says_so(cli: Cli, threaded_manager: ThreadedManager) -> None:
    threaded_manager.scripts.generate = [aborted]

    result = cli("chat", stdin="hi")

    assert (result.exit_code, result.stdout) == (1, TEXT + "\n")
    assert "aborted: somebody ended the request" in result.stderr


async def _two_outputs(request: pb.GenerateRequest, _context: object) -> AsyncIterator[pb.GenerateResponse]:
    """Output 1 ends before output 0."""
    for index, text in ((0, "a"), (1, "b"), (0, "c\n")):
        yield pb.GenerateResponse(
            request_id=request.request_id,
            text=text,
            token_ids=[index],
            index=index,
            usage=common_pb2.Usage(prompt_tokens=7, completion_tokens=2 - index),
            finish_reason=common_pb2.FINISH_REASON_UNSPECIFIED if text == "a" else common_pb2.FINISH_REASON_LENGTH,
        )


def test_generate_several_outputs_are_printed_as_they_are_complete(cli: Cli, threaded_manager: ThreadedManager) -> None:
    threaded_manager.scripts.generate = [_two_outputs]
    result = cli("generate", "hello", "-N", "2", "--usage")
    assert (result.exit_code, result.stdout) == (0, "[1] b\n[0] ac\n")
    assert "7 prompt tokens" in result.stderr
    assert "3 completion tokens" in result.stderr
    assert [request.n for request in threaded_manager.scripts.of("Generate")] == [2]


def test_generate_several_outputs_as_json(cli: Cli, threaded_manager: ThreadedManager) -> None:
    threaded_manager.scripts.generate = [_two_outputs]
    pieces = lines(cli("generate", "hello", "-N", "2", "--json"))
    assert [(piece["index"], piece["text"]) for piece in pieces] == [(0, "a"), (1, "b"), (0, "c\n")]
    outputs = lines(cli("generate", "hello", "-N", "2", "--json", "--no-stream"))
    assert [(output["index"], output["text"]) for output in outputs] == [(1, "b"), (0, "ac\n")]
