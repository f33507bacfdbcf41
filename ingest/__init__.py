"""The queue protocol: Redis streams in, fenced event streams and pub/sub out."""
