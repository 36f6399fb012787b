"""Are the answers right, and what do masks cost?"""
