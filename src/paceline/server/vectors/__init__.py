"""Endpoints whose answers are vectors or scores of texts."""
