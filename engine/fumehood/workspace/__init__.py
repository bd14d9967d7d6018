"""Session files (a part): the tools that work on the files of sessions, and the upload and download
of these files.
"""
