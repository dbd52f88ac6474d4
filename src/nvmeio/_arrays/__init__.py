"""Arrays in files: indexing, .npy headers, conversion of elements."""
