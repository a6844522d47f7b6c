"""A server on this machine: where it listens, where it logs, and the command lines of its two services.

Station: made by ``kvplane up``, which has the supervisor run what it says. It starts nothing.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvplane_client.cli.child_process import ChildSpec
from kvplane_client.cli.session import CommandError

__all__ = ["LocalServer"]

# An address of RFC 5737, which no machine has.
_ELSEWHERE = ("192.0.2.1", 9)
# What is wrong with the host, not with the port.
_OF_THE_HOST = dict.fromkeys(
    (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAMILY),
    "expected an address of this machine as --host; 127.0.0.1 is this machine alone, 0.0.0.0 every interface",
)
# Whatever ends the supervisor ends the services.
_FIXED = ("--log-format", "json", "--exit-with-parent")


@dataclass(frozen=True, slots=True)
class LocalServer:
    """What both services are told of each other.

    Attributes:
        host: The address that the manager listens on.
        port: Its port.
        log_folder: Where both log.
    """

    host: str
    port: int
    log_folder: Path

    @classmethod
    def planned(cls, host: str, port: int, state_dir: Path | None) -> LocalServer:
        """Finds a port and a folder.

        Args:
            host: The address to listen on.
            port: The port, or 0 for a free one.
            state_dir: The folder for logs; None is the user's state folder.

        Raises:
            CommandError: The port is taken, or the folder cannot be written.
        """
        port = _free_port(host, port)
        return cls(host, port, _log_folder(state_dir, port))

    @property
    def address(self) -> str:
        """Where clients on this machine, and the executor, reach the manager."""
        host = "localhost" if self._listens_everywhere or self.host == "127.0.0.1" else self.host
        return _joined(host, self.port)

    @property
    def network_address(self) -> str | None:
        """Where other machines reach the manager if it listens on every interface; None where `address` is all."""
        return _joined(_own_host(), self.port) if self._listens_everywhere else None

    @property
    def _listens_everywhere(self) -> bool:
        return self.host in ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to

    def manager(self, flags: Mapping[str, object], extra: Sequence[str]) -> ChildSpec:
        """Returns how the manager is run: these flags as far as they have a value, then the extra arguments."""
        return self._service("manager", "kvmanager_service", ["--host", self.host, "--port", self.port], flags, extra)

    def executor(self, flags: Mapping[str, object], extra: Sequence[str]) -> ChildSpec:
        """Returns how the executor is run, in the same way."""
        return self._service("executor", "executor_service", ["--manager", self.address, "--port", 0], flags, extra)

    def _service(
        self, name: str, module: str, where: Sequence[object], flags: Mapping[str, object], extra: Sequence[str]
    ) -> ChildSpec:
        given = [item for flag, value in flags.items() if value is not None for item in (flag, value)]
        argv = [sys.executable, "-m", module, *map(str, where), *_FIXED, *map(str, given), *extra]
        return ChildSpec(name, argv, self.log_folder / f"{name}.log")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_host() -> str:
    """Returns this machine's address on its main network; where it has none, its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)  # chooses a route, sends nothing
        except OSError:
            return socket.gethostname()
        host: str = probe.getsockname()[0]
    return host


def _free_port(host: str, port: int) -> int:
    """Checks that the port can be listened on, or finds one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = f"cannot listen on {host}:{port}: {error.strerror}"
            advice = _OF_THE_HOST.get(error.errno or 0, "choose another --port")
            raise CommandError(f"{why}; {advice}") from error
        chosen: int = probe.getsockname()[1]
    return chosen


def _log_folder(state_dir: Path | None, port: int) -> Path:
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state_dir or home / "kvplane" / str(port)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write logs to {folder}: {error.strerror}; choose another --state-dir") from error
    return folder
