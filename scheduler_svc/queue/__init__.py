"""Waiting sequences and their order: one queue, or one per tenant, and the limits of each tenant."""
