"""`roster batch`: answers the requests of a file in the format of OpenAI's Batch API."""
