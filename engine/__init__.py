"""The inference engine: paged KV cache, continuous batching, models and decoding.

Nothing is imported here, so that the parts without torch (parameters, errors, scheduler, blocks) stay cheap to import.
"""
