"""Load of `paceline bench serve`: what is sent, how, and what came of it.  No torch."""
