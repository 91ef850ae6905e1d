"""The border between the process of HTTP and that of the engine: two ends of one socket."""
