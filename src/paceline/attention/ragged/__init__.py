"""Ragged attention: queries that attend to keys which lie as they do, in no cache; whose kernels do
it for latents that are expanded (attention/expanded.py)."""
