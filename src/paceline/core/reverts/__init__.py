"""Reverts: past bugs as data, the places their edits belong, and the hook that brings them back."""
