"""Publishes the content of all runners' prefix caches to subscribers: gateways that route by cached prefixes.

`PoolEventRecorder` records the events of one runner's pool, `Catalog` is the union of all pools, and `KvFeed` numbers
the changes and serves subscriptions. Nothing is recorded without subscribers.
"""
