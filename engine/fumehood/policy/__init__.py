"""The policy: rules that allow, ask or deny a call."""
