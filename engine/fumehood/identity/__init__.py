"""Identity: principals, tokens, approvers, agents, and the credentials they show."""
