"""The operators' view of all principals' calls: lists, details, searches, and metrics over time.

Host side. The view also shows the engine's state, and tries policy rules on past calls. The console
uses all of it.
"""
