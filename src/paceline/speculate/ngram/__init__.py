"""NGRAM: prompt lookup, from its settings to a proposer."""
