"""The state in PostgreSQL, files in a bucket, and the copy of a state: a part."""
