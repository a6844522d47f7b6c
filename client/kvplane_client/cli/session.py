"""Connecting to the server, and turning what goes wrong into a message and an exit code.

Station: every command that talks to a server runs inside one of these contexts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from kvplane_client.cli.connection import current_access
from kvplane_client.cli.output import err_console, error_document, escaped, print_json
from kvplane_client.cli.unreachable import advice_for
from kvplane_client.client import Client
from kvplane_client.errors import DeadlineExceededError, KvPlaneError, UnavailableError
from kvplane_client.manager_types import Model
from kvplane_client.retry import NO_RETRY, RetryListener, RetryPolicy

__all__ = [
    "EXIT_ERROR",
    "EXIT_INTERRUPTED",
    "EXIT_UNAVAILABLE",
    "EXIT_USAGE",
    "CommandError",
    "generation_session",
    "reported",
    "session",
    "usage_document",
]

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """Something a command expected to be able to do did not work. The message says what to do about it."""


@contextmanager
def reported(as_json: bool, server: str = "") -> Iterator[None]:
    """Reports expected errors on stderr and exits with the code that belongs to them.

    Args:
        as_json: Report as a JSON document.
        server: The address, for the advice that comes with an unreachable server.
    """
    try:
        yield
    except UnavailableError as error:
        advice = advice_for(error, server, uses_tls=current_access().credentials is not None)
        _fail(EXIT_UNAVAILABLE, error.message, error_document(error), as_json, advice)
    except DeadlineExceededError as error:
        message = "--deadline: expected the output to end in time, got no end"
        _fail(EXIT_ERROR, message, error_document(error), as_json, "give it longer, or ask for fewer tokens with -n")
    except KvPlaneError as error:
        _fail(EXIT_ERROR, error.message, error_document(error), as_json, error.reason)
    except CommandError as error:
        _fail(EXIT_ERROR, str(error), _plain_document("FAILED", str(error)), as_json)
    except KeyboardInterrupt:
        _fail(EXIT_INTERRUPTED, "interrupted", _plain_document("CANCELLED", "interrupted"), as_json)


@contextmanager
def session(server: str, *, as_json: bool, wait: float) -> Iterator[Client]:
    """Connects for a command that asks and shows: it fails at once where the server does.

    Args:
        server: The address.
        as_json: Report errors as JSON.
        wait: Seconds to wait for the server to become ready; 0 does not wait.
    """
    with reported(as_json, server), _client(server, NO_RETRY, as_json=as_json) as client:
        if wait > 0:
            client.wait_ready(wait)
        yield client


@contextmanager
def generation_session(server: str, *, as_json: bool, wait: float) -> Iterator[tuple[Client, Model]]:
    """Connects for a command that generates: once the server has answered, a break is survived.

    Args:
        server: The address.
        as_json: Report errors as JSON.
        wait: Seconds to wait for the server to become ready; 0 does not wait.
    """
    with session(server, as_json=as_json, wait=wait) as probe:
        model = probe.get_model()
        on_retry = _note_retry if as_json else _say_retry
        with _client(server, RetryPolicy(), on_retry, as_json=as_json, warns=False) as client:
            yield client, model


def _client(
    server: str, retry: RetryPolicy, on_retry: RetryListener | None = None, *, as_json: bool, warns: bool = True
) -> Client:
    """Makes a client with the command's access; says on stderr, if it is the first, what the library warns of."""
    access = current_access()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = Client(server, retry=retry, on_retry=on_retry, credentials=access.credentials, api_key=access.api_key)
    for warning in caught if warns else ():
        if as_json:
            print_json({"event": "warning", "message": str(warning.message)}, to_stderr=True)
        else:
            err_console().print(f"[yellow]warning:[/yellow] {escaped(str(warning.message))}")
    return client


def _say_retry(error: KvPlaneError, pause: float) -> None:
    # With a reason a server has answered, and no connection was lost: it says what is missing, such as an executor.
    what = "the server can not go on yet" if error.reason else "connection lost"
    err_console().print(f"[dim]{what}, trying again in {pause:.1f} s: {escaped(error.message)}[/dim]")


def _note_retry(error: KvPlaneError, pause: float) -> None:
    print_json({"event": "retrying", "pause": pause, "message": error.message}, to_stderr=True)


def usage_document(error: Exception) -> dict[str, object]:
    """Returns the JSON form of wrong usage.

    Args:
        error: typer's.
    """
    return _plain_document("INVALID_ARGUMENT", error.format_message())  # type: ignore[attr-defined]


def _plain_document(code: str, message: str) -> dict[str, object]:
    return {"error": {"code": code, "reason": "", "message": message, "metadata": {}, "retry_delay": None}}


def _fail(exit_code: int, message: str, document: dict[str, object], as_json: bool, advice: str = "") -> NoReturn:
    if as_json:
        print_json(document, to_stderr=True)
    else:
        console = err_console()
        console.print(f"[bold red]error:[/bold red] {escaped(message, as_lines=True)}")
        if advice:
            console.print(f"[dim]{escaped(advice, as_lines=True)}[/dim]")
    raise typer.Exit(exit_code)
