"""The state that must survive the process: a SQLite or PostgreSQL database, its writer, and files.

Host side. This package contains the database, its schema and migrations, and the SQL for calls,
sessions, idempotency keys and blobs. The SQL of other features is in their own packages.
"""
