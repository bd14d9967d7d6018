"""Which tools exist: declared, discovered, checked and kept in an index."""
