"""The container runtime Docker."""
