"""Background processes: programs that run in a session, independently of its calls."""
