"""Oracle: what each case comes to, in float64, and what classic mistakes would make of it."""
