"""The request table: a row of the device for each running request."""
