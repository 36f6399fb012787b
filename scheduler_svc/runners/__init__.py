"""The runners of one engine, and the placement of waiting sequences on them."""
