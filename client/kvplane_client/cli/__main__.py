"""``python -m kvplane_client.cli``: the ``kvplane`` command without its script."""

from kvplane_client.cli.main import app

app(prog_name="kvplane")
