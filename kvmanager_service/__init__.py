"""The control plane: knows every request, owns the block pool, decides what each step computes. No torch."""
