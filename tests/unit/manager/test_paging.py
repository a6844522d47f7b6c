"""Page sizes and tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.servicers.paging import page_size, read_block_token, read_request_token, request_token


def test_page_size_zero_is_default_and_most_is_allowed() -> None:
    assert [page_size(asked, default=100, most=1_000) for asked in (0, 1, 1_000)] == [100, 1, 1_000]


@pytest.mark.parametrize("asked", [-1, 1_001])
def test_page_size_out_of_range_is_refused(asked: int) -> None:
    with pytest.raises(InvalidRequestError, match="page_size: expected 0 to 1000"):
        page_size(asked, default=100, most=1_000)


@given(time=st.floats(allow_nan=False, allow_infinity=False), request_id=st.text())
def test_request_token_reads_back_what_was_named(time: float, request_id: str) -> None:
    assert read_request_token(request_token(time, request_id)) == (time, request_id)


@pytest.mark.parametrize("token", ["x", "0x1p0", "nan id", "inf id", "5", "0x1p99999 a"])
def test_request_token_of_others_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequestError, match="page_token"):
        read_request_token(token)


@pytest.mark.parametrize("token", ["x", "-1", "1.5", "٣", "12345678901"])
def test_block_token_of_others_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequestError, match="page_token"):
        read_block_token(token)


def test_tokens_absent_mean_first_page() -> None:
    assert (read_request_token(""), read_block_token("")) == (None, 0)
