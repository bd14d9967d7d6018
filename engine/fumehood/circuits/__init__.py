"""Circuit breakers: if a service fails too often, calls to it are refused until trial requests
succeed.
"""
