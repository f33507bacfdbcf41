-- Writes what became of a leased delivery. Fenced by the lease; repeating the call changes nothing.
-- KEYS 1 deliveries by due time, 2 the delivery, 3 dead letters, 4 statistics
-- ARGV 1 delivery id, 2 lease, 3 state: "delivered", "retrying" (tried, and due again), "later" (not tried, due again: its
--      state stays), or one that is final: "dead" "blocked" "disabled", 4 ms until it is due again, 5 HTTP status or empty,
--      6 what went wrong or empty
-- Replies "ok", or "lost": the lease is another sender's
-- include clock
local DELIVERED_TTL_MS = 3600000
if redis.call('HGET', KEYS[2], 'lease') ~= ARGV[2] then return 'lost' end
local now, state = server_ms(), ARGV[3]

redis.call('HDEL', KEYS[2], 'lease')
if state == 'later' then
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[4]), ARGV[1])
  return 'ok'
end
redis.call('HSET', KEYS[2], 'state', state, 'status', ARGV[5], 'error', ARGV[6], 'last', now)
if state == 'delivered' or state == 'retrying' or state == 'dead' then redis.call('HINCRBY', KEYS[2], 'tries', 1) end
if state == 'retrying' then
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[4]), ARGV[1])
  return 'ok'
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HINCRBY', KEYS[4], 'hooks_' .. state, 1)
if state == 'delivered' then
  redis.call('HDEL', KEYS[2], 'data')
  redis.call('PEXPIRE', KEYS[2], DELIVERED_TTL_MS)
else
  local r = redis.call('HMGET', KEYS[2], 'request', 'type', 'url', 'tries', 'tenant')
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 10000, '*', 'hook', ARGV[1], 'request', r[1], 'tenant', r[5] or 'default',
    'type', r[2], 'url', r[3], 'reason', state, 'tries', r[4], 'status', ARGV[5], 'error', ARGV[6])
end
return 'ok'
