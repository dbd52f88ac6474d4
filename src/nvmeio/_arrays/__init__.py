"""Arrays in files: what an index names, what a header says."""
