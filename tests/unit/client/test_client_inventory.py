from __future__ import annotations

from io import StringIO

import pytest
from kvplane_client.cli import output
from kvplane_client.cli.inventory import _request_table
from kvplane_client.manager_types import RequestInfo, RequestStatus


@pytest.mark.parametrize("name", ["[/bold]", "[red]x", "localhost:abc:", ":smile:", "\\[a]"])
def test_request_table_shows_names_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    info = RequestInfo(name, RequestStatus.RUNNING, 0, 1, 1, 1, 0, 0, (1,), 1.0, None, name)

    output.out_console().print(_request_table([info]))

    assert shown.getvalue().splitlines()[1].split()[:1] == [name]
    assert shown.getvalue().count(name) == 2
