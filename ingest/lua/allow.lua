-- Counts one more generation of a tenant against its limits, for all gateways together.
-- KEYS 1 bucket (hash: tokens, at), 2 what is open (sorted set, names by the ms until which they count)
-- ARGV 1 name, 2 generations a minute or empty, 3 generations at once or empty, 4 ms that it counts unless it is renewed
-- Replies {0}; or {ms after which asking again is worth while, "open" or "rate", how many are open}: it does not count
-- include clock
local now = server_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local at_once, rate = tonumber(ARGV[3]), tonumber(ARGV[2])
if at_once then
  local open = redis.call('ZCARD', KEYS[2])
  if open >= at_once then return {1000, 'open', open} end
end
if rate then
  local known = redis.call('HMGET', KEYS[1], 'tokens', 'at')
  local tokens = known[1] and math.min(rate, tonumber(known[1]) + (now - tonumber(known[2])) * rate / 60000) or rate
  if tokens < 1 then return {math.ceil((1 - tokens) * 60000 / rate), 'rate', 0} end
  redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens - 1), 'at', now)
  redis.call('PEXPIRE', KEYS[1], 120000)
end
if at_once then
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[4]), ARGV[1])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
return {0}
