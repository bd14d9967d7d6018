"""The files of sessions: tools for them, and their way in and out."""
