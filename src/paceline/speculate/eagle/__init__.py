"""EAGLE: heads on the target's hidden states, from config.json to a proposer."""
