"""Every request of the clients as a function that makes one. None knows a socket."""
