"""Ways to notify people outside the engine of approvals, and to take their decisions."""
