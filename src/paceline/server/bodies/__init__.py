"""From the bytes of a body to token ids and parameters, and what is wrong with it."""
