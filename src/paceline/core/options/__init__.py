"""The options of an engine: what they are, how people write them, what was asked."""
