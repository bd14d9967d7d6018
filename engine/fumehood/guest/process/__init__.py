"""The guest of the process walls, interpreter and jail: many children of one supervisor."""
