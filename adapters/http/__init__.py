"""The HTTP gateway: OpenAI's routes and native ones over the queue. Knows the queue's client side and no engine."""
