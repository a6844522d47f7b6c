"""An executor backend in NumPy alone; `docs/write-a-backend.md` walks through it."""
