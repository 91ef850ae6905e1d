"""Sanitizer: every step twice, the second time over poison; see the architecture page."""
