"""Completions: who hears of them, who waits for them, how long they took."""
