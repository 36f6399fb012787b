"""What the prefix caches of all runners hold, told to whoever follows it: a gateway that routes by cached prefixes.

`PoolEventRecorder` hears a runner's pool, `Catalog` is the union of all of them, `KvFeed` numbers the changes and
serves subscriptions. While nobody follows, nothing is recorded.
"""
