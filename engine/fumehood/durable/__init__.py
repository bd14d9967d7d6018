"""Durable sessions: copies of their files, made after each call: a part."""
