"""Storage of the state that must survive the process: a SQLite or PostgreSQL database, and files.

Host side. This package contains the database, the thread that writes it, its schema and migrations,
and the SQL for calls, sessions, idempotency keys and blobs. The SQL of other features is in the
packages of these features.
"""
