"""Where untrusted code runs, seen from the host."""
