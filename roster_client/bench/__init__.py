"""`roster bench`: generates open-loop load on a server, records every request, and writes reports."""
