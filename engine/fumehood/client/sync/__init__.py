"""The synchronous client. scripts/make_sync_client.py generates every module in this folder."""
