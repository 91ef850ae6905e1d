"""The blocks that mix the tokens of a request."""
