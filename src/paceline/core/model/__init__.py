"""The shape of a model: its layers, what they cache, and in which groups."""
