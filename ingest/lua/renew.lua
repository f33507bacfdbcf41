-- Renews an engine's lease: it lives, and this is how it is. Forgets engines that have been silent for an hour.
-- KEYS 1 heartbeats, 2 engines
-- ARGV 1 owner, 2 description as JSON
-- Replies the server's time in ms
-- include clock
local now = server_ms()
local old = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - 3600000, 'LIMIT', 0, 100)
for _, name in ipairs(old) do
  redis.call('ZREM', KEYS[1], name)
  redis.call('HDEL', KEYS[2], name)
end
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return now
