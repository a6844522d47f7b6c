"""Backends: what an executor computes with. `base.Backend` is the seam."""
