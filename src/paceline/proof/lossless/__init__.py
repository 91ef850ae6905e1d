"""Lossless: speculation and its layers against plain decoding, prompt by prompt."""
