"""The synchronous client. scripts/make_clients.py generates every module in this folder."""
