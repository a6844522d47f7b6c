"""Adapters from a hub: a server of the test's own, asked by the process that fetches."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from executor_service import lora_hub
from executor_service.backends.base import AdapterError
from executor_service.lora_files import CONFIG_FILE, WEIGHTS_FILE
from executor_service.lora_hub import fetch_adapter

ADAPTER = "someone/adapter"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MIB = 1 << 20


class Hub(ThreadingHTTPServer):
    """As much of the hub as fetching takes: one repository; `silent` are the files that it never sends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, bytes] = {}
        self.silent: set[str] = set()
        self.sent: list[str] = []
        self.over = threading.Event()


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        hub = self.server
        if self.path.startswith(f"/api/models/{ADAPTER}/revision/"):
            siblings = [{"rfilename": name} for name in hub.files]
            content = json.dumps({"id": ADAPTER, "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith(f"/api/models/{ADAPTER}/tree/"):
            tree = [{"type": "file", "path": name, "size": len(file), "oid": name} for name, file in hub.files.items()]
            content = json.dumps(tree).encode()
        elif self.path.startswith(f"/{ADAPTER}/resolve/") and (name := self.path.rpartition("/")[2]) in hub.files:
            content = hub.files[name]
            if body and name in hub.silent:
                hub.over.wait()
                return
            if body:
                hub.sent.append(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{len(content)}-{self.path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{made.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        made.files = {CONFIG_FILE: b"{}", WEIGHTS_FILE: bytes(3 * MIB), "optimizer.pt": b"not wanted"}
        yield made
        made.over.set()
        made.shutdown()
        thread.join()


def fetch(max_file_bytes: int = 4 * MIB) -> Path:
    return fetch_adapter(ADAPTER, (CONFIG_FILE, WEIGHTS_FILE), max_file_bytes)


def test_fetch_adapter_brings_its_files_once_and_no_others(hub: Hub) -> None:
    folder = fetch()
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert (folder / WEIGHTS_FILE).stat().st_size == 3 * MIB
    assert fetch() == folder
    assert sorted(hub.sent) == [CONFIG_FILE, WEIGHTS_FILE]


def test_fetch_adapter_that_is_too_large_is_refused_and_fills_no_disk(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=rf"at most {MIB} bytes in '{ADAPTER}', as --max-lora-rank allows") as caught:
        fetch(MIB)
    assert (caught.value.reason, caught.value.metadata["source"]) == ("ADAPTER_TOO_LARGE", ADAPTER)
    assert all(path.stat().st_size <= MIB for path in tmp_path.rglob("*"))
    assert WEIGHTS_FILE in hub.sent


def test_fetch_adapter_that_the_hub_does_not_send_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.silent.add(WEIGHTS_FILE)
    monkeypatch.setattr(lora_hub, "_TIME_LIMIT_S", 4)
    with pytest.raises(AdapterError, match=r"within 4 seconds, got no end of it; try again, or fetch it") as caught:
        fetch()
    assert caught.value.reason == "ADAPTER_NOT_REACHABLE"


def test_fetch_adapter_that_the_hub_does_not_have_is_refused(hub: Hub) -> None:
    del hub
    with pytest.raises(
        AdapterError, match=r"(?s)'someone/other' is no folder .* could not be fetched .*HF_TOKEN"
    ) as caught:
        fetch_adapter("someone/other", (CONFIG_FILE,), MIB)
    assert caught.value.reason == "ADAPTER_NOT_REACHABLE"
