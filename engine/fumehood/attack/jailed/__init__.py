"""The import path of the jail's attacks: all that a function there may see of this engine's own."""
