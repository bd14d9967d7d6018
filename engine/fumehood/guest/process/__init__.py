"""The guest of the process walls (interpreter and jail): one supervisor with many children."""
