"""Receipts: the inputs and results of a program's call, with which the program can be run again."""
