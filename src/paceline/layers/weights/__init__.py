"""Weights: where they are allocated, and the formats they are stored in."""
