"""Tools for authors of definitions: lint rules, comparison of versions, and golden sequences."""
