"""A producer: push requests onto the queue, read one as it comes, the rest when they are done.

Start an engine first (`make serve`), then `python examples/producer.py [REDIS_URL]`. Needs redis, orjson and structlog
only; torch is not imported.
"""

import sys

from pagemill import Client

url = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379/0"
questions = ["What is a queue?", "What is a stream?", "What is a cache?"]

with Client(redis_url=url) as client:
    story = client.submit(prompt="Once upon a time", max_tokens=48, temperature=0.8, seed=7)
    answers = [
        client.submit(messages=[{"role": "user", "content": question}], max_tokens=32, priority=2)
        for question in questions
    ]
    for delta in story:
        print(delta.text, end="", flush=True)
    print()
    for question, answer in zip(questions, answers, strict=True):
        result = answer.result(timeout=120)
        print(f"{question} {result.text.strip()!r} ({result.finish_reason}, {result.metrics['total_ms']:.0f} ms)")
