"""A part: the state in PostgreSQL, with engines that stand by, and files in a bucket."""
