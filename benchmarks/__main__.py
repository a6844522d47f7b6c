"""All benchmarks, one after another: `make bench`. Each has flags of its own; see its `--help`."""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """Run them; the model's one only where a model is named."""
    names = ["bench_core", "bench_scale", "bench_swap", "bench_peer", "bench_split"]
    if os.environ.get("KVPLANE_TEST_MODEL"):
        names.append("bench_serve")
    for name in names:
        print(f"== {name}", flush=True)
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
