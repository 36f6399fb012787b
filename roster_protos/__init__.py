"""Python code generated from protos/*.proto (`make protos`): the contracts, and all that the services share of them."""
