"""The registry: which tools exist, and whether each definition is sound.

Host side. Tools come from `@tool` functions, entry points, registrations and a watched directory;
`index.py` holds them by name and version.
"""
