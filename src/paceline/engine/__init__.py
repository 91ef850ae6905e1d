"""Engine: requests from their prompts' tokens to their ends, in integers and strings.

Here live the scheduler, both loops, the life of a request, its completions and what its caller sees
of them.  What may not live here: torch, options, and how a step runs: the loop knows the runner by
what it calls.
"""
