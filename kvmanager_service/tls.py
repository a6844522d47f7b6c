"""TLS for the manager's port.

Station: called by `server` before it listens. gRPC says of a bad certificate only that it cannot listen, so it is tried
with the standard library first.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from kvmanager_service.config import ConfigError
from kvmanager_service.secret_files import read_file, read_secret

__all__ = ["server_credentials"]


def server_credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """Read a certificate, with the chain that leads to it, and its private key; both PEM.

    Raises:
        ConfigError: one cannot be read, others than its owner and group may read the key, or they do not go together.
    """
    chain, private_key = read_file("--tls-certificate", certificate), read_secret("--tls-key", key)
    try:
        # A key with a password is refused here: without one given, the standard library would ask on the terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError, OSError) as error:
        # Without a reason OpenSSL found no certificate, or no key, in a file that should hold one.
        reason = error.reason if isinstance(error, ssl.SSLError) else type(error).__name__
        why = reason or "one of them is not what it is given as"
        raise ConfigError(
            f"--tls-certificate, --tls-key: expected a PEM certificate and its private key without a password, got"
            f" {certificate} and {key}: {why}. Give the two that were made together"
        ) from None
    return grpc.ssl_server_credentials([(private_key, chain)])
