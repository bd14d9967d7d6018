"""Webhooks: signed messages to another program, owed until they are delivered."""
