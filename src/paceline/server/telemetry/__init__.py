"""What a server tells of its requests: a line each, counters, and spans if a collector is named."""
