"""CLI: the `paceline` command, one file per verb, imported when the verb is called.

Here live argument parsing, printing and exit codes.  What may not live here: anything a Python
caller of `LLM` would want as well; a verb calls a room and prints what it returns.
"""
