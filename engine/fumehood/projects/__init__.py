"""Projects (a part): a directory of the host is copied into a session, and approved changes are
written back.
"""
