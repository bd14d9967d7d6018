"""Modules that the guest provides to programs. No image contains them.

Each file provides the module with the file's name, which the file's class `Maker` creates (see
`languages/given.py`). The module's owner on the host sends the data for it as an argument of the
program's run.
"""
