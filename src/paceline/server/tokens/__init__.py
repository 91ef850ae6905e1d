"""Texts as tokens and back: /tokenize, /detokenize, and /version."""
