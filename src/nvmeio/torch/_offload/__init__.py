"""Keep optimizer states, and tensors saved by forward passes, on a drive."""
