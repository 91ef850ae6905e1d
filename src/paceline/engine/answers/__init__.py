"""What callers see of their requests."""
