"""The key file: what it says, what is refused before a manager starts, and that no key is ever quoted."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from kvmanager_service.api_keys import KeyRing, read_api_keys
from kvmanager_service.callers import Caller, Role
from kvmanager_service.config import ConfigError

ALICE, BOB, ROOT, WORKER = (f"{name}-{name}-0123456789abcdef" for name in ("al", "bo", "ro", "wo"))
FILE = f"""
[tenants]
alice = "{ALICE}"
"team b/Ü" = '{BOB}'
[operators]
root = "{ROOT}"
[executors]
worker = "{WORKER}"
"""


def written(folder: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def refusal(path: Path) -> str:
    """What is said of a file that will not do; the traceback, which a log may show, says no more of it."""
    with pytest.raises(ConfigError) as caught:
        read_api_keys(path)
    told = "".join(traceback.format_exception(caught.value))
    assert "0123456789" not in told
    message = str(caught.value)
    assert "--api-keys: " in message
    assert "expected " in message
    return message


def test_keys_are_known_by_name_and_role(tmp_path: Path) -> None:
    ring = read_api_keys(written(tmp_path, FILE))
    assert ring.caller(ALICE) == Caller("alice", Role.TENANT)
    assert ring.caller(BOB) == Caller("team b/Ü", Role.TENANT)
    assert ring.caller(ROOT) == Caller("root", Role.OPERATOR)
    assert ring.caller(WORKER) == Caller("worker", Role.EXECUTOR)
    assert [ring.count(role) for role in Role] == [2, 1, 1]


@pytest.mark.parametrize("key", ["", ALICE[:-1], ALICE + "x", ALICE.upper(), "alice", "Größe", "x" * 100_000])
def test_keys_of_nobody_are_unknown(tmp_path: Path, key: str) -> None:
    assert read_api_keys(written(tmp_path, FILE)).caller(key) is None


def test_key_ring_holds_no_key() -> None:
    """Not where a debugger, or a log of local variables, would look for it."""
    ring = KeyRing({ALICE: Caller("alice", Role.TENANT)})
    held = repr([getattr(ring, name) for name in KeyRing.__slots__])
    assert ALICE not in held
    assert repr(ALICE.encode()) not in held


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o777, 0o644])
def test_key_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    assert f"with mode {mode:04o}. chmod 640 it" in refusal(written(tmp_path, FILE, mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440, 0o660])
def test_key_file_of_owner_and_group_is_read(tmp_path: Path, mode: int) -> None:
    assert read_api_keys(written(tmp_path, FILE, mode)).caller(ALICE) is not None


def test_key_file_that_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    assert "No such file or directory" in refusal(tmp_path / "none.toml")
    tmp_path.chmod(0o700)
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (f"[tenants]\nalice = {ALICE}", "expected TOML in"),
        (f"[tenants]\nalice = {ALICE}", "line 2, column"),
        (f'[tenants]\na = "{ALICE}"\na = "{BOB}"\n', "line 3, column"),
        (f'[tenants\na = "{ALICE}"', "line 1, column"),
        (f"[tenants]\na = '{ALICE}", "got something else at end of document"),
        (b"[tenants]\na = '\xff0123456789abcdef'", "got something else."),
        (f'alice = "{ALICE}"', "got something that is in none"),
        (f'"{ALICE}" = "alice"', "got something that is in none"),
        (f'[tenant]\nalice = "{ALICE}"', "got table [tenant]"),
        (f'[[tenants]]\nalice = "{ALICE}"', "got something that is in none"),
        (f'[tenants]\nb = "{BOB}"\n"{ALICE}" = "alice"', "entry 2 of [tenants]"),
        ("", "expected at least one key"),
        ("[tenants]\n[operators]", "expected at least one key"),
        (f'[tenants]\na = "{ALICE}"\n[operators]\na = "{BOB}"', "got 'a' twice"),
        (f'[tenants]\na = "{ALICE}"\n[operators]\nb = "{ALICE}"', "got one for 'a' and 'b'"),
        ('[tenants]\na = ""', "16 to 512 visible ASCII characters, got 0"),
        (f'[tenants]\na = "{ALICE[:15]}"', "got 15"),
        (f'[tenants]\na = "{ALICE * 30}"', "got 660"),
        (f'[tenants]\na = " {ALICE}"', "got others among them"),
        (f'[tenants]\na = "{ALICE}\\n"', "got others among them"),
        (f'[tenants]\na = "ü{ALICE}"', "got others among them"),
        ("[tenants]\na = 1234567890123456", "got a value that is no string"),
        (f'[tenants]\na.b = "{ALICE}"', "got a value that is no string"),
        (f'[tenants]\n"" = "{ALICE}"', "expected a name of 1 to 256"),
        (f'[tenants]\n"a\\nb" = "{ALICE}"', "expected a name of 1 to 256"),
        (f'[tenants]\n{"a" * 257} = "{ALICE}"', "expected a name of 1 to 256"),
    ],
)
def test_key_file_of_another_form_is_refused(tmp_path: Path, content: str | bytes, told: str) -> None:
    assert told in refusal(written(tmp_path, content))
