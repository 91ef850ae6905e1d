"""Traffic of benches: its shape, its requests and their times, one pass, its waits."""
