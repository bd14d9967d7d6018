"""Modules that the guest gives to programs. No image contains them.

Each file is one module of this name, and its class `Maker` (`languages/given.py`) makes it. The
module's owner on the host sends what it is made from, as an argument of the program's run.
"""
