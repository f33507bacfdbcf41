-- Renews an engine's lease: it lives, this is how it is, and this is what it has computed. Forgets engines that have been
-- silent for an hour.
-- KEYS 1 heartbeats, 2 engines, 3 names of the prompt beginnings that it has, 4 what it is told
-- ARGV 1 owner, 2 description as JSON, 3... these names
-- Replies {the server's time in ms, that of the heartbeat before or ''}
-- include clock
-- include placement
local now = server_ms()
local before = redis.call('ZSCORE', KEYS[1], ARGV[1])
if before and math.abs(now - tonumber(before)) < 60000 then -- else all may be old: this machine slept, or the clock was set
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now - 3600000, 'LIMIT', 0, 100)) do
    redis.call('ZREM', KEYS[1], name)
    redis.call('HDEL', KEYS[2], name)
  end
end
redis.call('UNLINK', KEYS[3]) -- first, since a full server lets through what has freed something: engines must not seem dead
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if ARGV[3] then
  redis.call('SADD', KEYS[3], unpack(ARGV, 3))
  redis.call('PEXPIRE', KEYS[3], WARM_TTL_MS)
end
redis.call('PEXPIRE', KEYS[4], WARM_TTL_MS)
return {now, before or ''}
