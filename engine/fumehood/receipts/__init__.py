"""Receipts (a part): a receipt contains the inputs and results of a program's call, so that the
program can be run again and the results compared.
"""
