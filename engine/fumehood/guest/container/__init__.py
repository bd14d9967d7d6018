"""The guest in a container: its first process is the supervisor; programs run as another user."""
