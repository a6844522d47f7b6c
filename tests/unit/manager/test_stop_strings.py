"""Stop strings are found as a naive search over the whole text would find them, however it is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager_service.text.stop_strings import StopStrings

ALPHABET = st.text(alphabet="ab\n", max_size=4)


def naive(text: str, stops: list[str], first_end: int) -> tuple[str, str | None, str]:
    """The text before the match, the match, and what is after, by looking at each end in turn."""
    for end in range(first_end, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            match = max(found, key=len)
            return text[: end - len(match)], match, text[end:]
    return text, None, ""


@settings(max_examples=1000)
@given(
    pieces=st.lists(ALPHABET, max_size=12),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    num_ignored=st.integers(0, 4),
)
def test_stop_strings_any_cut_equals_naive_search(
    pieces: list[str], stops: list[str], include: bool, num_ignored: int
) -> None:
    watcher = StopStrings(stops, include=include)
    out: list[str] = []
    for index, piece in enumerate(pieces):
        out.append(watcher.push(piece, may_stop=index >= num_ignored))
        if watcher.match is not None:
            break
    ignored = "".join(pieces[:num_ignored])
    before, match, _ = naive("".join(pieces), stops, len(ignored) + 1)
    assert watcher.match == match
    if match is None:
        assert "".join(out) + watcher.flush() == "".join(pieces)
    else:
        assert "".join(out) == (before + match if include else before)


@settings(max_examples=500)
@given(
    pieces=st.lists(ALPHABET, max_size=12),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_stop_strings_held_text_is_longest_possible_beginning(pieces: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops, include=False)
    whole = ""
    for piece in pieces:
        watcher.push(piece, may_stop=True)
        if watcher.match is not None:
            return
        whole += piece
        ends = (whole[at:] for at in range(len(whole) + 1))
        longest = next(end for end in ends if any(stop.startswith(end) and stop != end for stop in stops))
        assert watcher.held == longest


def test_stop_strings_overlapping_matches_first_complete_one_wins() -> None:
    watcher = StopStrings(["abcd", "bc"], include=False)
    assert watcher.push("xabcd", may_stop=True) == "xa"
    assert watcher.match == "bc"


def test_stop_strings_same_end_longest_wins() -> None:
    watcher = StopStrings(["c", "abc"], include=True)
    assert watcher.push("xab", may_stop=True) == "x"
    assert watcher.push("cd", may_stop=True) == "abc"
    assert watcher.match == "abc"


def test_stop_strings_false_start_is_let_out() -> None:
    watcher = StopStrings(["STOP"], include=False)
    assert watcher.push("xSTO", may_stop=True) == "x"
    assert watcher.push("RM", may_stop=True) == "STORM"
    assert watcher.held == ""
