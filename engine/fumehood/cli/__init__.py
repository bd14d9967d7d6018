"""The command line: one file a command. JSON on stdout, messages on stderr."""
