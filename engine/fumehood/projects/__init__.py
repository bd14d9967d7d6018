"""A project directory of the host: into a session as a copy, and back as an approved diff."""
