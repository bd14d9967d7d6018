"""Code mode: programs in containers call other tools."""
