"""The runners behind one engine, and which of them a waiting sequence goes to."""
