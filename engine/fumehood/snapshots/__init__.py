"""Snapshots and forks of sessions with a disk: a part."""
