"""How commands reach the server: TLS and the key, options that all of them share.

Station: `main` wraps each command that talks to a server in `connected`; `session` asks for the access. So no command
hands on what it does not use. A key is never an option's value: whoever lists processes sees those.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from kvplane_client._stubs import check_api_key
from kvplane_client.cli.option_panel import Panel
from kvplane_client.cli.signature import shows

__all__ = ["API_KEY_VARIABLE", "Access", "connected", "current_access", "read_api_key"]

API_KEY_VARIABLE = "KVPLANE_API_KEY"
_PANEL = Panel("Connection")


@dataclass(frozen=True, slots=True)
class Access:
    """What a client is made with, beside the address.

    Attributes:
        credentials: For TLS; None means plain text.
        api_key: The key; None means none.
    """

    credentials: grpc.ChannelCredentials | None = None
    api_key: str | None = field(default=None, repr=False)


_access: ContextVar[Access | None] = ContextVar("access", default=None)


def current_access() -> Access:
    """Returns how the command that runs reaches its server."""
    return _access.get() or Access(api_key=_key_of_environment())


def read_api_key(given: str) -> str:
    """Reads a key from a file that holds nothing else; blanks and line ends around it do not count.

    Raises:
        typer.BadParameter: It cannot be read, or holds no key.
    """
    try:
        content = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise typer.BadParameter(
            f"expected a file with a key, got {given}: {why}; correct the path or its permissions"
        ) from None
    return _checked(content.strip(), f"expected a file with a key and nothing else, got another content in {given}")


def read_ca(given: str) -> bytes:
    """Reads a file of PEM certificates.

    Raises:
        typer.BadParameter: It cannot be read, or holds none.
    """
    expected = "expected a PEM file with the certificates to trust"
    try:
        content = Path(given).read_bytes()
    except OSError as error:
        raise typer.BadParameter(
            f"{expected}, got {given}: {error.strerror}; correct the path or its permissions"
        ) from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise typer.BadParameter(f"{expected}, got none in {given}; a self-signed certificate is its own")
    return content


_OPTIONS: dict[str, Any] = {
    "tls": (
        Annotated[bool, _PANEL.option("--tls", "Use TLS, with the system's authorities.", envvar="KVPLANE_TLS")],
        False,
    ),
    "tls_ca": (
        Annotated[
            bytes | None,
            _PANEL.option(
                "--tls-ca FILE", "Use TLS, and trust these PEM certificates.", parser=read_ca, envvar="KVPLANE_TLS_CA"
            ),
        ],
        None,
    ),
    "api_key_file": (
        Annotated[
            str | None,
            _PANEL.option(
                "--api-key-file FILE",
                "File with your key. Without it, KVPLANE_API_KEY is the key.",
                parser=read_api_key,
                envvar="KVPLANE_API_KEY_FILE",
            ),
        ],
        None,
    ),
}


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a connection to a command that opens a session."""

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> None:
        tls, ca, key = (given.pop(name) for name in _OPTIONS)
        credentials = grpc.ssl_channel_credentials(ca) if tls or ca is not None else None
        token = _access.set(Access(credentials, key or _key_of_environment()))
        try:
            command(*args, **given)
        finally:
            _access.reset(token)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    return shows(run, [*inspect.signature(command, eval_str=True).parameters.values(), *added])


def _key_of_environment() -> str | None:
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    return _checked(key, f"expected a key in {API_KEY_VARIABLE}, got something else") if key else None


def _checked(key: str, message: str) -> str:
    try:
        check_api_key(key)
    except ValueError:
        raise typer.BadParameter(f"{message}; a key is visible ASCII characters without blanks") from None
    return key
