"""The state that must survive the process: one SQLite database, its single writer, and files.

Host side. Here are the database itself, its schema and migrations, and the rows of calls,
sessions, idempotency keys and blobs. Every other feature keeps its SQL in its own package.
"""
