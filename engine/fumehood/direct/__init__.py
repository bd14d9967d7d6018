"""Containers without Docker: a launcher of this software starts them itself."""
