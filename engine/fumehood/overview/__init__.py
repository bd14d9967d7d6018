"""The part with which operators see everybody's calls: lists, details, searches, figures over time.

Host side. It also shows the engine's state, and tries rules of a policy on past calls. The console
asks for all of this.
"""
