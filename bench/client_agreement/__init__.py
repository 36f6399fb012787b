"""Does an independent client measure the same as ours, and the same as the wire?"""
