"""Plan: from what was asked to what will run, before a weight is read.

Here live the options' resolution with the origin of every value, who drafts, which attention serves
each phase, the memory budget, what fits instead, this machine, and what explains all that.  What
may not live here: requests, and tensors of a step.
"""
