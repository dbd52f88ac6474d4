"""Completions: callbacks, waiting, event loops, latencies."""
