"""Tools for authors of tool definitions: lint rules, comparison of versions, and golden
sequences.
"""
