"""Webhooks: signed deliveries from the outbox, with an address guard, retries and dead letters."""
