"""Projects: a host directory is copied into a session, and approved changes are written back."""
