"""The guest in a container: supervisor as its first process, children as another user."""
