"""The keys of those who may call: read from a file, kept as digests.

Station: read by `server`, asked by `authentication`. Neither a key nor a line of the file enters a message or a log.
"""

from __future__ import annotations

import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvmanager_service.callers import Caller, Role
from kvmanager_service.config import ConfigError
from kvmanager_service.secret_files import read_secret

__all__ = ["KeyRing", "read_api_keys"]

MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512
MAX_NAME_CHARS = 256
"""As long as a tenant's name may be in a request."""
_FLAG = "--api-keys"
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
_TABLES = {"tenants": Role.TENANT, "operators": Role.OPERATOR, "executors": Role.EXECUTOR}
_FORM = f'tables {", ".join(f"[{name}]" for name in _TABLES)} of name = "key"'
_POSITION = re.compile(r"\(at (.+)\)$")
_SELECTOR_BYTES = 16
_NOBODY = (bytes(sha256().digest_size), None)


class KeyRing:
    """Tells whose a key is, in a time that does not depend on how much of it is right.

    Args:
        keys: whose each is.

    A key is known by its HMAC under a secret of this run: one half finds the candidate, and is nothing that a caller
    can predict; the whole is compared in constant time. It costs the same for one key and for a hundred thousand.
    """

    __slots__ = ("_candidates", "_secret")

    def __init__(self, keys: Mapping[str, Caller]) -> None:
        self._secret = secrets.token_bytes(32)
        self._candidates: dict[bytes, tuple[bytes, Caller | None]] = {}
        for key, caller in keys.items():
            digest = self._digest(key)
            self._candidates[digest[:_SELECTOR_BYTES]] = (digest, caller)

    def caller(self, key: str) -> Caller | None:
        """Return whose a key is; None for one that is nobody's."""
        digest = self._digest(key)
        known, caller = self._candidates.get(digest[:_SELECTOR_BYTES], _NOBODY)
        return caller if hmac.compare_digest(known, digest) else None

    def count(self, role: Role) -> int:
        """Return how many keys are of a role."""
        return sum(caller is not None and caller.role is role for _, caller in self._candidates.values())

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(), "sha256")


def read_api_keys(path: Path) -> KeyRing:
    """Read a key file.

    Raises:
        ConfigError: it cannot be read, others than its owner and group may, or it is not of the form that
            docs/security.md describes.
    """
    content = read_secret(_FLAG, path)
    try:
        document = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        place = _POSITION.search(str(error))  # nothing else of the message, which may quote the file
        where = f" at {place[1]}" if place else ""
        raise ConfigError(f"{_FLAG}: expected TOML in {path}, got something else{where}. Write {_FORM}") from None
    keys: dict[str, Caller] = {}
    names: set[str] = set()
    for table, entries in document.items():
        if table not in _TABLES or not isinstance(entries, dict):
            got = f"table [{table}]" if isinstance(entries, dict) else "something that is in none"
            raise ConfigError(f"{_FLAG}: expected {_FORM} in {path}, got {got}. Correct it")
        for number, (name, key) in enumerate(entries.items(), start=1):
            # By its number: a name may be a key that was written on the wrong side.
            _check(f"{_FLAG}: entry {number} of [{table}] in {path}", name, key)
            if name in names:
                raise ConfigError(
                    f"{_FLAG}: expected each name once in {path}, got {name!r} twice. Rename one: a name is what tells"
                    " callers apart"
                )
            if key in keys:
                raise ConfigError(
                    f"{_FLAG}: expected a key of its own for each name in {path}, got one for {keys[key].name!r} and"
                    f" {name!r}. {_make_one()}"
                )
            names.add(name)
            keys[key] = Caller(name, _TABLES[table])
    if not keys:
        raise ConfigError(
            f"{_FLAG}: expected at least one key in {path}, got none, so that nobody could call. Write {_FORM}, or"
            f" leave {_FLAG} out to let everybody call"
        )
    return KeyRing(keys)


def _check(where: str, name: str, key: Any) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(f"{where}: expected a name of 1 to {MAX_NAME_CHARS} printable characters. Choose another")
    if not isinstance(key, str):
        raise ConfigError(f'{where}: expected name = "key", got a value that is no string. Put the key in quotes')
    if not _KEY.fullmatch(key):
        got = f"{len(key)}" if key.isascii() and key.isprintable() and " " not in key else "others among them"
        raise ConfigError(
            f"{where}: expected a key of {MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible ASCII characters, got {got}."
            f" {_make_one()}"
        )


def _make_one() -> str:
    return "`openssl rand -hex 32` makes one"
