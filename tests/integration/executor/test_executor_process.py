"""The executor as a process of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import grpc
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.sim_digest import expected_tokens
from tests.unit.executor.step_builder import save_tiny_model
from tests.unit.executor_shell.executor_builders import (
    VOCAB_SIZE,
    Row,
    connected,
    error_info,
    make_step,
    values_of,
)

SIM = ["--backend", "sim", "--port", "0", "--block-size", "4", "--sim-num-blocks", "64", "--log-format", "json"]
PATHS = os.pathsep.join(path for path in sys.path if path)


@contextmanager
def process(*flags, command=("-m", "executor_service"), stdin=None, **environment):
    running = subprocess.Popen(
        [sys.executable, *command, *SIM, "--sim-vocab-size", str(VOCAB_SIZE), *flags],
        stdin=stdin,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PATHS} | environment,
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        running.stderr.close()


def wait_for(running, event):
    """Read log lines until the event; every line is one JSON object."""
    for line in running.stderr:
        record = json.loads(line)
        if record["event"] == event:
            return record
    raise AssertionError(f"the process ended without {event}")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_process_serves_then_exits_0_on_signal(signum):
    with process(KVPLANE_EXECUTOR_EXECUTOR_ID="e-7") as running:
        ready = wait_for(running, "executor_ready")
        assert (ready["executor_id"], ready["level"], ready["backend"]) == ("e-7", "info", "sim")
        async with connected(ready["address"]) as client:
            epoch = await client.handshake()
            response = await client.execute().step(make_step(1, epoch, [Row([1, 2, 3], [4])]))
            assert values_of(response.sampled_token_ids) == expected_tokens([1, 2, 3], 1, vocab_size=VOCAB_SIZE)
        running.send_signal(signum)
        wait_for(running, "executor_stopped")
        assert running.wait(timeout=60) == 0


async def test_process_stopped_with_a_step_running_answers_it_and_ends_the_stream():
    with process("--sim-step-ms", "1500") as running:
        async with connected(wait_for(running, "executor_ready")["address"]) as client:
            epoch = await client.handshake()
            stream = client.execute()
            await stream.send(make_step(1, epoch, [Row([1], [4])]))
            await stream.send(make_step(2, epoch, [Row([1], [4], start=1)]))
            assert (await stream.receive()).step_id == 1
            # Step 2 lay queued while step 1 computed. It is taken up at once, but on a busy machine that may be later
            # than now.
            await asyncio.sleep(0.5)
            running.send_signal(signal.SIGTERM)
            assert (await stream.receive()).step_id == 2
            error = await stream.error()
            assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_STOPPING")
        assert running.wait(timeout=60) == 0


def test_process_setting_that_does_not_fit_the_model_is_logged_and_exits_2():
    with process("--sim-eos-token-ids", str(VOCAB_SIZE)) as running:
        failed = wait_for(running, "executor_load_failed")
        assert (failed["reason"], failed["level"]) == ("BAD_EOS_TOKEN_ID", "error")
        assert running.wait(timeout=60) == 2


async def test_process_whose_memory_holds_no_sequence_says_so_to_the_manager_and_exits_1():
    with process("--max-model-len", "1000") as running:
        async with connected(wait_for(running, "executor_ready")["address"]) as client:
            call = client.stub.ProfileMemory(pb.ProfileMemoryRequest(max_num_batched_tokens=1, max_num_seqs=1))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert wait_for(running, "memory_not_enough")["error"] == caught.value.details()
        assert running.wait(timeout=60) == 1


def test_process_whose_weights_exceed_the_memory_limit_stops_before_it_loads_them_and_exits_1(tmp_path):
    folder = save_tiny_model(tmp_path, "llama")
    with process("--backend", "torch", "--model", str(folder), "--memory-limit", "64KiB") as running:
        failed = wait_for(running, "executor_load_failed")
        assert (failed["reason"], failed["level"]) == ("NOT_ENOUGH_MEMORY", "error")
        assert failed["metadata"]["total_bytes"] == "65536"
        assert int(failed["metadata"]["weights_bytes"]) > 65536
        assert "--memory-limit" in failed["error"]
        assert running.wait(timeout=60) == 1


def test_process_installed_without_what_an_executor_needs_is_logged_and_exits_1():
    """As the manager is, where numpy is missing."""
    code = "import sys; sys.modules['numpy'] = None; from executor_service.__main__ import main; main()"
    with process(command=("-c", code)) as running:
        message = wait_for(running, "library_missing")["error"]
        assert message.startswith("expected the libraries of an executor, got no numpy; pip install ")
        assert running.wait(timeout=60) == 1


def test_process_unknown_backend_is_logged_and_exits_2():
    with process("--backend", "abacus") as running:
        assert "expected one of" in wait_for(running, "backend_unavailable")["error"]
        assert running.wait(timeout=60) == 2


def test_process_port_that_is_taken_is_logged_and_exits_1():
    with process() as first:
        address = wait_for(first, "executor_ready")["address"]
        with process("--port", address.rpartition(":")[2]) as second:
            assert address in wait_for(second, "executor_bind_failed")["error"]
            assert second.wait(timeout=60) == 1


# The backend's load outlasts the test.
LOADS_FOR_EVER = """
import sys, threading
from executor_service.backends import sim_backend
from executor_service.__main__ import main

def load(self):
    print('{"event": "load_has_begun"}', file=sys.stderr, flush=True)
    threading.Event().wait()

sim_backend.SimBackend.load = load
main()
"""


def test_process_stopped_while_it_loads_does_not_wait_for_it_and_exits_0():
    with process(command=("-c", LOADS_FOR_EVER)) as running:
        wait_for(running, "load_has_begun")
        running.send_signal(signal.SIGTERM)
        wait_for(running, "compute_abandoned")
        assert running.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("command", "event"),
    [(("-c", LOADS_FOR_EVER), "load_has_begun"), (("-m", "executor_service"), "executor_ready")],
    ids=["loading", "ready"],
)
def test_process_with_exit_with_parent_ends_at_the_end_of_standard_input(command, event):
    with process("--exit-with-parent", command=command, stdin=subprocess.PIPE) as running:
        wait_for(running, event)
        running.stdin.write("what is written there changes nothing")
        running.stdin.flush()
        assert running.poll() is None
        running.stdin.close()
        assert running.wait(timeout=60) == 1
        assert "executor_stopped" not in running.stderr.read()


def test_process_without_exit_with_parent_outlives_standard_input():
    with process(stdin=subprocess.DEVNULL) as running:
        wait_for(running, "executor_ready")
        running.send_signal(signal.SIGTERM)
        wait_for(running, "executor_stopped")
        assert running.wait(timeout=60) == 0


def test_process_bad_value_exits_2():
    with process("--block-size", "0") as running:
        assert running.stderr.read().startswith("--block-size: expected greater than or equal to 1, got '0'")
        assert running.wait(timeout=60) == 2
