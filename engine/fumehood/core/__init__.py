"""Values: frozen types that every other room speaks in. No I/O, clock or randomness."""
