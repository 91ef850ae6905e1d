"""Bench: what an engine, or attention alone, takes and serves on this machine.

Here live what is sent, how it is timed, the peers timed beside it, and the tables and pages of what
came of it.  What may not live here: anything that a server or a caller of `LLM` needs, and any
library a GPU box without the extras lacks.
"""
