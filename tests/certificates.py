"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for localhost, which is its own authority."""

    certificate: Path
    key: Path


def make_certificate(folder: Path, *, password: str = "") -> Certificate:
    """Make one in a folder."""
    made = Certificate(folder / "tls.crt", folder / "tls.key")
    encrypted = ["-passout", f"pass:{password}"] if password else ["-noenc"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", *encrypted,
         "-out", str(made.certificate), "-keyout", str(made.key)],
        check=True, capture_output=True,
    )  # fmt: skip
    made.key.chmod(0o600)
    return made
