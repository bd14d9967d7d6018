"""The container wall, host side: programs of strangers in hardened Docker containers."""
