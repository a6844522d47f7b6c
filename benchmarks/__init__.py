"""Benchmarks: each prints its figures, `--json` for scripts. Tests never assert times; these measure them."""
