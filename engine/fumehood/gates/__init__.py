"""Reasons to refuse. None knows another; the stages in `call/` ask them in order."""
