"""Session files: the tools that work on them, and their upload and download."""
