"""The daemon: HTTP/1.1 and JSON over Unix sockets."""
