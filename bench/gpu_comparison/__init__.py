"""Two comparisons on one card.

The files here compare Roster's policies with transformers' continuous batching, within a budget of seconds. The folder
`peers`, which is `--peer vllm` on the command line, compares Roster with another server, in parts that a later call
resumes. It shares the shapes, the trace and the budget with the first, and nothing else.
"""
