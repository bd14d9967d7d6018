"""The Model Context Protocol: the daemon's server, and the command that speaks it over stdio."""
