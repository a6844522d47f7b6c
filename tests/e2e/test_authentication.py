"""Keys and TLS with real processes: an executor that registers by its key, tenants apart, and the command."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
from kvplane_client import (
    AsyncClient,
    Client,
    Completion,
    NotFoundError,
    PermissionDeniedError,
    RetryPolicy,
    UnauthenticatedError,
)

from tests.certificates import Certificate, make_certificate
from tests.e2e.cluster import ROOT, Cluster, environment, serving

KEYS = {name: f"{name}-key-0123456789" for name in ("alice", "bob", "carol", "root", "worker")}
PROMPT = list(range(1, 100))


def write_keys(path: Path, *tenants: str) -> None:
    lines = ["[tenants]", *(f'{name} = "{KEYS[name]}"' for name in tenants)]
    path.write_text(
        "\n".join([*lines, f'[operators]\nroot = "{KEYS["root"]}"', f'[executors]\nw = "{KEYS["worker"]}"'])
    )
    path.chmod(0o600)


class Guarded:
    """A cluster with keys and TLS."""

    def __init__(self, cluster: Cluster, folder: Path, certificate: Certificate) -> None:
        self.cluster = cluster
        self.folder = folder
        self.certificate = certificate
        self.key_file = folder / "keys.toml"

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.certificate.certificate.read_bytes())

    def client(self, name: str | None) -> AsyncClient:
        return self.cluster.client(credentials=self.credentials(), api_key=name and KEYS[name])

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command with somebody's key, in the environment."""
        settings = {
            "KVPLANE_SERVER": self.cluster.address,
            "KVPLANE_TLS_CA": str(self.certificate.certificate),
            "KVPLANE_API_KEY": KEYS[name],
        }
        command = [sys.executable, "-m", "kvplane_client.cli", *arguments]
        return subprocess.run(
            command, env=environment(**settings), cwd=ROOT, capture_output=True, text=True, check=False
        )


@pytest.fixture
async def guarded(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Guarded]:
    made = Guarded(cluster, tmp_path, make_certificate(tmp_path))
    write_keys(made.key_file, "alice", "bob")
    worker_key = tmp_path / "worker.key"
    worker_key.write_text(KEYS["worker"] + "\n")
    cluster.start(
        {
            "api_keys": made.key_file,
            "isolate_tenants": True,
            "tls_certificate": made.certificate.certificate,
            "tls_key": made.certificate.key,
        },
        manager_tls_ca=made.certificate.certificate,
        manager_api_key_file=worker_key,
    )
    yield made
    for process in (cluster.manager, *cluster.executors):
        told = "\n".join([*process.lines(), *psutil.Process(process.pid).cmdline()])
        assert not any(key in told for key in KEYS.values())


async def test_tenants_with_keys_share_no_blocks_and_no_names(guarded: Guarded) -> None:
    async with guarded.client("alice") as alice, guarded.client("bob") as bob, guarded.client("root") as root:
        await serving(root)
        first = await alice.generate(PROMPT, max_tokens=8, seed=1)
        again = await alice.generate(PROMPT, max_tokens=8, seed=1)
        of_bob = await bob.generate(PROMPT, max_tokens=8, seed=1)
        assert first.token_ids == again.token_ids == of_bob.token_ids
        assert [one.usage.cached_tokens for one in (first, again, of_bob)] == [0, 96, 0]
        (batched,) = await bob.generate_batch([PROMPT], max_tokens=8, seed=1)
        assert isinstance(batched, Completion)
        assert batched.usage.cached_tokens == 96
        with pytest.raises(PermissionDeniedError, match="expected 'bob'") as caught:
            await bob.generate(PROMPT, max_tokens=1, tenant="alice")
        assert caught.value.reason == "TENANT_FORBIDDEN"
        (refused,) = await bob.generate_batch([PROMPT], max_tokens=1, tenant="alice")
        assert isinstance(refused, PermissionDeniedError)
        in_her_name = await root.generate(PROMPT, max_tokens=1, tenant="alice")
        assert in_her_name.usage.cached_tokens == 96

        tenants = [info.tenant async for info in root.list_requests(include_finished=True)]
        assert sorted(tenants) == ["alice", "alice", "alice", "bob", "bob"]
        assert {info.tenant async for info in bob.list_requests(include_finished=True)} == {"bob"}
        with pytest.raises(PermissionDeniedError, match="the key of an operator"):
            await alice.get_stats()
        with pytest.raises(PermissionDeniedError):
            await anext(aiter(alice.watch_kv_events()))
        stream = alice.stream(PROMPT, max_tokens=10_000, ignore_eos=True, request_id="hers")
        await anext(stream)
        with pytest.raises(NotFoundError):
            await bob.abort("hers")
        await alice.abort("hers")
        assert [chunk.finish_reason async for chunk in stream][-1] == "abort"


async def test_keys_of_nobody_are_refused_at_once_and_new_ones_count_from_a_signal_on(guarded: Guarded) -> None:
    for name in (None, "carol"):
        async with guarded.client(name) as client:
            with pytest.raises(UnauthenticatedError):
                await client.get_model()
    write_keys(guarded.key_file, "alice", "carol")
    guarded.cluster.manager.signal(signal.SIGHUP)
    event = await guarded.cluster.manager.logged("api_keys_read", 2)
    assert (event["tenants"], event["operators"], event["executors"]) == (2, 1, 1)

    def ask_as(name: str) -> str:
        with Client(guarded.cluster.address, credentials=guarded.credentials(), api_key=KEYS[name]) as client:
            return client.wait_ready(30).name

    assert await asyncio.to_thread(ask_as, "carol")
    with pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(ask_as, "bob")


async def test_command_takes_the_key_from_environment_or_file(guarded: Guarded) -> None:
    key_file = guarded.folder / "root.key"
    key_file.write_text(KEYS["root"])
    run = guarded.command
    generated = await asyncio.to_thread(run, "alice", "generate", "--token-ids", "1,2,3", "-n", "2", "--wait", "30")
    assert generated.returncode == 0, generated.stderr
    forbidden = await asyncio.to_thread(run, "alice", "stats", "--json")
    assert (forbidden.returncode, json.loads(forbidden.stderr)["error"]["reason"]) == (1, "METHOD_FORBIDDEN")
    shown = await asyncio.to_thread(run, "alice", "stats", "--json", "--api-key-file", str(key_file))
    assert json.loads(shown.stdout)["settings"]["isolate_tenants"] is True, shown.stderr
    blocks = await asyncio.to_thread(run, "root", "blocks", "--filter", "cached", "--json")
    assert blocks.returncode == 0, blocks.stderr
    unknown = await asyncio.to_thread(run, "carol", "model", "info", "--json")
    assert (unknown.returncode, json.loads(unknown.stderr)["error"]["reason"]) == (1, "UNKNOWN_KEY")


async def test_executor_without_its_key_is_not_used_and_says_why(cluster: Cluster, tmp_path: Path) -> None:
    cluster.expected_errors = {"registration_refused"}
    write_keys(tmp_path / "keys.toml", "alice")
    cluster.start_manager(api_keys=tmp_path / "keys.toml")
    executor = cluster.start_executor(wait=False)
    event = await executor.logged("registration_refused")
    assert event["code"] == "UNAUTHENTICATED"
    assert "KVPLANE_API_KEY" in event["error"]
    async with cluster.client(api_key=KEYS["root"], retry=RetryPolicy(max_attempts=1)) as root:
        assert list(await root.list_executors()) == []


async def test_isolation_without_keys_is_said_to_rest_on_trust(cluster: Cluster) -> None:
    cluster.start_manager(isolate_tenants=True)
    assert len(cluster.manager.events("tenants_not_authenticated")) == 1
