"""The Model Context Protocol: the engine as a server, and servers whose tools the engine calls."""
