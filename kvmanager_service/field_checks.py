"""What many messages have in common: texts and lists of a limited length.

Station: called by whatever reads messages, calls nobody. A range that one message alone has is checked where that
message is read, by `invalid_parameter` like these.
"""

from __future__ import annotations

from collections.abc import Collection

from kvmanager_service.core.errors import invalid_parameter

__all__ = ["MAX_SALT_CHARS", "MAX_TENANT_CHARS", "check_count", "check_length"]

MAX_SALT_CHARS = 256
MAX_TENANT_CHARS = 256


def check_count(field: str, values: Collection[object], most: int) -> None:
    """Raise InvalidRequestError when there are more than `most` values."""
    if len(values) > most:
        raise invalid_parameter(field, f"at most {most} entries", len(values), "send fewer")


def check_length(field: str, text: str, least: int, most: int) -> None:
    """Raise InvalidRequestError unless a text has `least` to `most` characters."""
    if not least <= len(text) <= most:
        advice = "shorten it" if text else "leave it out"
        raise invalid_parameter(field, f"{least} to {most} characters", len(text), advice)
