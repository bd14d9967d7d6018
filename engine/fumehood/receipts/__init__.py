"""Receipts: the inputs and results of a program's call, to run the program again."""
