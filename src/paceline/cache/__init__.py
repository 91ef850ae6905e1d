"""KV cache: which page holds which tokens, and who may still touch it.

Here live pages and their life cycle, cache groups, the prefix tree, the manager that the scheduler
talks to, and the device tensors of the pool.  What may not live here: requests, policies of who
runs next, and anything a kernel needs beyond page ids.
"""
