"""Page sizes and page tokens of the listings.

Station: used by the servicers that list. A token names the last item of its page, so that a page goes on after it
however the list changed in between: what was there all the time is listed exactly once.
"""

from __future__ import annotations

import math

from kvmanager_service.core.errors import InvalidRequestError, invalid_parameter

__all__ = ["page_size", "read_block_token", "read_request_token", "request_token"]


def page_size(asked: int, *, default: int, most: int) -> int:
    """Return the size of a page; 0 asks for the default.

    Raises:
        InvalidRequestError: it is negative or too large.
    """
    if not 0 <= asked <= most:
        raise invalid_parameter("page_size", f"0 to {most}", asked, f"0 means {default}")
    return asked or default


def request_token(arrival_time: float, request_id: str) -> str:
    """Name a request as the last one of a page."""
    return f"{arrival_time.hex()} {request_id}"


def read_request_token(token: str) -> tuple[float, str] | None:
    """Return arrival time and id of the last request of the page before, or None for the first page.

    Raises:
        InvalidRequestError: it is not one of our tokens.
    """
    if not token:
        return None
    time, space, request_id = token.partition(" ")
    try:
        arrival_time = float.fromhex(time)
    except (ValueError, OverflowError):
        arrival_time = math.nan
    if not space or not math.isfinite(arrival_time):
        raise _foreign_token()
    return arrival_time, request_id


def read_block_token(token: str) -> int:
    """Return the id of the last block of the page before, or 0 for the first page; its token is that id.

    Raises:
        InvalidRequestError: it is not one of our tokens.
    """
    if not token:
        return 0
    if not (token.isascii() and token.isdecimal() and len(token) <= 10):
        raise _foreign_token()
    return int(token)


def _foreign_token() -> InvalidRequestError:
    expected, advice = "next_page_token of the page before", "start at the first page"
    return invalid_parameter("page_token", expected, "another text", advice)
