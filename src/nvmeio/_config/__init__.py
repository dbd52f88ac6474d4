"""Options of handles, from arguments, environment and profiles; and the build record."""
