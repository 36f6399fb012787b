"""The production engine, scheduler and policies on a virtual clock: a policy is tried here before it serves."""
