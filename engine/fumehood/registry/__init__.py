"""The registry: which tools exist, and whether the definition of each tool is valid.

Host side. Tools come from `@tool` functions, entry points, registrations and a watched directory.
`index.py` holds all tools by name and version.
"""
