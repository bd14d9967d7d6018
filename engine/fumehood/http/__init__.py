"""The daemon: HTTP/1.1 and JSON on a Unix socket."""
