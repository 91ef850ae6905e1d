"""The memory budget: what an engine takes, counted in a rehearsal, and what fits."""
