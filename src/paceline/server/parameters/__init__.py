"""What a request may ask for: rules between its fields, and the table of all of them."""
