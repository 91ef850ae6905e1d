"""Decoder layers, by where their norms stand and what they mix tokens with."""
