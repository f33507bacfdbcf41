"""The protocol with plain Redis commands, as any language can speak it. `python examples/raw_redis.py [REDIS_URL]`

Subscribe first, then push: the channel carries `<seq> <json>`, and the stream `pm:{default.0}:ev:<id>` keeps the same
events for whoever comes later.
"""

import json
import sys
import uuid

import redis

url = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379/0"
request_id = f"raw-{uuid.uuid4().hex}"
server = redis.Redis.from_url(url, decode_responses=True)

with server.pubsub() as events:
    events.subscribe("pm:{default.0}:ch:" + request_id)
    events.get_message(timeout=5)  # the confirmation: nothing is missed from here on
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0})
    server.xadd("pm:{default.0}:in:1", {"v": "1", "id": request_id, "body": body})
    for message in events.listen():
        _, _, text = message["data"].partition(" ")
        event = json.loads(text)
        if event["type"] == "delta":
            print(event["text"], end="", flush=True)
        elif event["type"] == "done":
            print(f"\n{event['state']}: {event['usage']}")
            break
