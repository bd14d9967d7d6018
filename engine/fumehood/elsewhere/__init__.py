"""The part that keeps the state in PostgreSQL and files in a bucket, and copies a stopped engine's
state.
"""
