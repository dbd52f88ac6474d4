"""What tune tries, how it measures that, and who wins in spite of noise."""
