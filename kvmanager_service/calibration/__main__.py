"""`python -m kvmanager_service.calibration`: time an executor's steps, fit the terms, write them down.

Exit status: 0 done, 1 the executor or the file can not be used, 2 wrong usage, 3 nobody there, 130 interrupted.
"""

from __future__ import annotations

import sys

from kvmanager_service.interrupts import quiet_interrupts

if __name__ == "__main__":
    with quiet_interrupts():
        from kvmanager_service.calibration.command import main
    sys.exit(main(sys.argv[1:]))
