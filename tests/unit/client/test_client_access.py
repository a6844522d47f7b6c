"""Keys and TLS of the client: what is sent, what is warned of, and what is never quoted."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

import grpc
import pytest
import typer
from kvplane_client import AsyncClient, Client, PlainTextKeyWarning
from kvplane_client.cli.connection import Access, read_api_key, read_ca

KEY = "a-key-0123456789"


@pytest.mark.parametrize(
    "target",
    ["10.0.0.1:50051", "manager:50051", "[2001:db8::1]:50051", "dns:///manager:50051", "ipv4:10.0.0.1:5", "0.0.0.0:5",
     "localhost.example.org:5", "127.0.0.1.example.org:5"],
)  # fmt: skip
async def test_key_in_plain_text_to_another_machine_is_warned_of(target: str) -> None:
    with pytest.warns(PlainTextKeyWarning, match="in plain text") as caught:
        AsyncClient(target, api_key=KEY)
    assert KEY not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AsyncClient(target)
        AsyncClient(target, api_key=KEY, credentials=grpc.ssl_channel_credentials())


@pytest.mark.parametrize(
    "target",
    ["localhost:50051", "127.0.0.1:50051", "127.8.9.1:5", "[::1]:50051", "dns:///localhost:5", "ipv4:127.0.0.1:5",
     "ipv6:[::1]:5", "unix:/run/kvplane.sock", "unix-abstract:kvplane"],
)  # fmt: skip
async def test_key_on_this_machine_is_not_warned_of(target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AsyncClient(target, api_key=KEY)


@pytest.mark.parametrize("key", ["", " ", f"{KEY}\n", f"{KEY} x", f"ü{KEY}", f"{KEY}\x00"])
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_key_that_cannot_be_sent_is_refused_and_not_quoted(kind: type[AsyncClient | Client], key: str) -> None:
    with pytest.raises(ValueError, match="api_key: expected visible ASCII characters") as caught:
        kind("localhost:1", api_key=key)
    assert "0123456789" not in "".join(traceback.format_exception_only(caught.value))


def test_access_is_shown_without_its_key() -> None:
    assert KEY not in repr(Access(api_key=KEY))


def test_key_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert read_api_key(str(tmp_path / "key")) == KEY


@pytest.mark.parametrize("content", [b"", b"\n", f"{KEY}\n{KEY}".encode(), f'alice = "{KEY}"'.encode(), b"\xff\xfe"])
def test_key_file_with_another_content_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(typer.BadParameter, match="expected a file with a key") as caught:
        read_api_key(str(tmp_path / "key"))
    assert "0123456789" not in "".join(traceback.format_exception(caught.value))


def test_files_that_are_missing_or_hold_no_certificate_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("none")
    for read in (read_api_key, read_ca):
        with pytest.raises(typer.BadParameter, match=r"got .*none: No such file"):
            read(str(tmp_path / "none"))
    with pytest.raises(typer.BadParameter, match="a PEM file with the certificates to trust, got none"):
        read_ca(str(tmp_path / "ca"))
