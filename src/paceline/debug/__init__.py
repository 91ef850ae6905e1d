"""Debug: what a person needs to see a bug, and to see that a test catches it.

Here live the fix switches as data, one file per past bug with the edits that bring it back, and
their list.  The hook that applies them is in core.  What may not live here: anything the engine
needs to serve.
"""
