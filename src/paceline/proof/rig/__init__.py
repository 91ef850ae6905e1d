"""Rig: one cell run through the real runner, and judged."""
