"""`python -m kvmanager_service.replay`: read a trace, run it, say what came of it.

Exit status: 0 done, 1 the trace or a file can not be used, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import sys

from kvmanager_service.interrupts import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from kvmanager_service.replay.command import main
    sys.exit(main(sys.argv[1:]))
