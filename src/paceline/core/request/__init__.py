"""What a caller may ask of one request, as plain data."""
