"""Files that must not be everybody's: keys.

Station: called by `api_keys` and `tls` when the manager starts, or reads its keys anew.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvmanager_service.config import ConfigError

__all__ = ["read_file", "read_secret"]


def read_secret(flag: str, path: Path) -> bytes:
    """Return a file's content, unless others than its owner and its group may read or write it.

    Args:
        flag: which names the file.
        path: the file.

    Raises:
        ConfigError: they may, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & stat.S_IRWXO:
                raise ConfigError(
                    f"{flag}: expected a file that only its owner and group may read, got {path} with mode {mode:04o}."
                    " chmod 640 it; a Kubernetes secret is mounted with defaultMode: 0440"
                )
            return file.read()
    except OSError as error:
        raise _unreadable(flag, path, error) from error


def read_file(flag: str, path: Path) -> bytes:
    """Return a file's content. Raises ConfigError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(flag, path, error) from error


def _unreadable(flag: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag}: expected a file that can be read, got {path}: {error.strerror}. Correct the path or its permissions"
    )
