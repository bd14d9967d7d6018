"""A part: durable sessions, whose files are copied after each call."""
