"""Fixes: past bugs as data, one file each with the edits that bring it back, and their list."""
