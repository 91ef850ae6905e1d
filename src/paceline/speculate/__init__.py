"""Proposers: who drafts the tokens that a round verifies.

Lives here: the drafters, a folder each, from config.json to a proposer; the two contracts by which
others know them; their cache and passes, and how trees are chosen.  What a round does with drafts
is `runner.program`'s; which drafter an engine gets is `plan.speculation`'s.  A drafter makes a
round fast or slow; it cannot change the text.
"""
