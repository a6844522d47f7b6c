"""Attention over a paged KV cache: `reference` is the oracle, `torch_paged` is what runs."""
