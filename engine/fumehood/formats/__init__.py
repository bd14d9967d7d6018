"""Tools in the formats of clients and providers."""
