"""Batches (a part): several calls in one request.

Host side, above the kernel. `batch.py` runs each call as if it had been sent alone. `routes.py` and
the clients send and receive batches, and `command.py` is `fumehood call --batch`.
"""
