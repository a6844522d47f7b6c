from __future__ import annotations

from io import StringIO

import pytest
from kvplane_client.cli import output
from kvplane_client.cli.inventory import _block_table, _request_table
from kvplane_client.manager_types import BlockInfo, RequestInfo, RequestStatus


@pytest.mark.parametrize("name", ["[/bold]", "[red]x", "localhost:abc:", ":smile:", "\\[a]"])
def test_request_table_shows_names_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    info = RequestInfo(name, RequestStatus.RUNNING, 0, 1, 1, 1, 0, 0, (1,), 1.0, None, name)

    output.out_console().print(_request_table([info]))

    assert shown.getvalue().splitlines()[1].split()[:1] == [name]
    assert shown.getvalue().count(name) == 2


def test_request_table_of_several_kv_groups_shows_a_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    tables = ((4, 5, 6), (0, 0, 9))
    info = RequestInfo("a", RequestStatus.RUNNING, 0, 1, 1, 1, 0, 0, tables[0], 1.0, None, "", tables)

    output.out_console().print(_request_table([info]))

    assert [line.split()[-1] for line in shown.getvalue().splitlines()[1:]] == ["4-6", "9"]


def test_block_table_shows_groups_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr("sys.stdout", shown)

    output.out_console().print(_block_table([BlockInfo(1, 0, "ab", False, 0)]))
    assert "group" not in shown.getvalue()

    output.out_console().print(_block_table([BlockInfo(1, 0, "ab", False, 1), BlockInfo(2, 1, None, False)]))
    lines = shown.getvalue().splitlines()[-3:]
    assert [line.split() for line in lines] == [
        ["block", "references", "state", "group", "hash"],
        ["1", "0", "free,", "cached", "1", "ab"],
        ["2", "1", "used"],
    ]
