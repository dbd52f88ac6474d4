"""What callers pass: checked, and named where it is wrong."""
