"""Circuit breakers: calls to a failing service are suspended until a trial succeeds."""
