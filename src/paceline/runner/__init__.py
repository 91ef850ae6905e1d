"""Runner: carries out one Step on a device, in whichever form.

Here live the request table, StepBuffers, staging, derive, commit, the segments of a step and the
graphs that record and replay them.  What may not live here: decisions about which requests run, and
a second preparation for any form of execution.
"""
