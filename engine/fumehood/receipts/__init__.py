"""Receipts: what a program's call depended on and what came of it, to run it again."""
