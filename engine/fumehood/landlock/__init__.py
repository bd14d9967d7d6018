"""The part landlock: programs on hosts that give no namespaces, without Docker."""
