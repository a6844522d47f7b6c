"""How the executor reaches its manager: TLS, and the key it registers with.

Station: made once by `server`, used by `registration`. A key comes from a file or the environment, never from a flag,
and enters no message and no log.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

import grpc
import structlog

from executor_service.config import ExecutorConfig

__all__ = ["API_KEY_VARIABLE", "AccessError", "ManagerAccess"]

API_KEY_VARIABLE = "KVPLANE_API_KEY"
_KEY = re.compile(r"[!-~]+")

_log = structlog.get_logger(__name__)


class AccessError(Exception):
    """A key or a certificate cannot be used; the message says expected, got and what to do."""


class ManagerAccess:
    """TLS and key of the connection to the manager.

    Args:
        credentials: for TLS; None means plain text.
        api_key: what the executor shows; empty means nothing.

    Attributes:
        metadata: goes with each call.
    """

    def __init__(self, credentials: grpc.ChannelCredentials | None = None, api_key: str = "") -> None:
        self._credentials = credentials
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    @classmethod
    def from_config(cls, config: ExecutorConfig) -> ManagerAccess:
        """Read what the configuration names; warn of a key that would go to another machine in plain text.

        Raises:
            AccessError: a file cannot be read, or holds something else.
        """
        credentials = None
        if config.manager_tls or config.manager_tls_ca:
            credentials = grpc.ssl_channel_credentials(_read_ca(config.manager_tls_ca))
        api_key = _read_key(config.manager_api_key_file)
        host = config.manager.rpartition(":")[0].strip("[]")
        if config.manager and api_key and credentials is None and not _is_loopback(host):
            _log.warning(
                "key_in_plain_text",
                manager=config.manager,
                note="who listens on the network can use the executor's key; give the manager --tls-certificate and"
                " this executor --manager-tls or --manager-tls-ca",
            )
        return cls(credentials, api_key)

    def channel(self, manager: str, options: tuple[tuple[str, int], ...]) -> grpc.aio.Channel:
        """Make a channel to the manager at host:port."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(manager, options=options)
        return grpc.aio.secure_channel(manager, self._credentials, options=options)


def _read_key(path: str) -> str:
    """Return the key of the file, or of the environment, or none."""
    if path:
        expected = f"--manager-api-key-file: expected a file with a key and nothing else, got {path}"
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise AccessError(f"{expected}: {error.strerror}. Correct the path or its permissions") from error
        except UnicodeDecodeError:
            raise AccessError(f"{expected}, which is no text. Correct the path") from None
    else:
        expected = f"{API_KEY_VARIABLE}: expected a key, got something else"
        key = os.environ.get(API_KEY_VARIABLE, "").strip()
        if not key:
            return ""
    if not _KEY.fullmatch(key):
        raise AccessError(f"{expected}. A key is visible ASCII characters without blanks")
    return key


def _read_ca(path: str) -> bytes | None:
    """Return the certificates to trust; None means the system's."""
    if not path:
        return None
    expected = f"--manager-tls-ca: expected a PEM file with the certificates to trust, got {path}"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise AccessError(f"{expected}: {error.strerror}. Correct the path or its permissions") from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise AccessError(f"{expected}, which holds none. A self-signed certificate is its own")
    return content


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
