"""The command line: one file per command group. JSON goes to stdout, messages to stderr."""
