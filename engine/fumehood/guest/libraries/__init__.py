"""Support for libraries that Python programs use. No image contains these modules.

Each file supports one library. It is a `Library` (see `languages/libraries.py`).
"""
