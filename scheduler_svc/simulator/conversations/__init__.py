"""Conversations of simulated clients: turns that begin after others have ended, and the contexts that they extend."""
