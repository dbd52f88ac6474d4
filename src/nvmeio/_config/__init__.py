"""Options of handles: passed, of the environment, of profiles; and what was built."""
