-- Leases deliveries that are due, the oldest first. One whose lease runs out unsettled is due again: its sender died.
-- KEYS 1 deliveries by due time, 2 URLs that are off
-- ARGV 1 key base, 2 lease (a word used once), 3 lease ms, 4 how many at most
-- Replies {now, ms until the next one is due or -1, {{delivery id, {fields}, why its URL is off or ""}, ...}}
-- include clock
local now = server_ms()
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[4])) do
  local key = ARGV[1] .. 'hook:' .. name
  local fields = redis.call('HGETALL', key)
  if #fields == 0 then
    redis.call('ZREM', KEYS[1], name)
  else
    redis.call('HSET', key, 'lease', ARGV[2])
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), name)
    found[#found + 1] = {name, fields, redis.call('HGET', KEYS[2], redis.call('HGET', key, 'url')) or ''}
  end
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {now, first[2] and math.max(0, tonumber(first[2]) - now) or -1, found}
