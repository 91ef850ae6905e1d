"""From where on it pays to read a prefix once for the requests that share it."""

MIN_SHARED_KEYS = 512  # of the prefix
MIN_SHARERS = 8  # requests of a step
