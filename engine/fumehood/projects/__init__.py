"""Projects: a host directory is copied into a session, and changes return as an approved diff."""
