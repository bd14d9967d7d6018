"""The registry: which tools exist, and whether the definition of each tool is sound.

Host side. Tools come from `@tool` functions, entry points, registrations and a watched directory.
`index.py` holds them by name and version.
"""
