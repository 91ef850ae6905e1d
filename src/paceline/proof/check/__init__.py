"""Check: which cells a run has, who runs them, and what is told of them."""
