"""What bench and tune measure: where, in which memory, and beside what."""
