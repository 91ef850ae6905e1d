"""Backends: one file per kernel library.  A backend imports no other backend."""
