"""Tools for authors of definitions: rules, changes between versions, golden sequences."""
