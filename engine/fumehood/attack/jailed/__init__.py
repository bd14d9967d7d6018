"""The import path of the jail's attacks: the only part of this engine's code that they can read."""
