"""Traffic of `paceline bench throughput`: its shape, its requests and their times, and one pass."""
