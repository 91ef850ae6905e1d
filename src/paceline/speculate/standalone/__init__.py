"""STANDALONE: a small language model of the same tokens, from its checks to a proposer."""
