"""`roster bench`: load that tells the truth about a server, per-request records, and reports on them."""
