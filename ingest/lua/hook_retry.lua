-- Sends a dead delivery again, with all of its tries. Repeating the call changes nothing.
-- KEYS 1 deliveries by due time, 2 the delivery, 3 dead letters
-- ARGV 1 delivery id, 2 dead letter, 3 time to live ms
-- Replies "ok", or "gone": what it said is not kept any more
-- include clock
redis.call('XDEL', KEYS[3], ARGV[2])
local state = redis.call('HMGET', KEYS[2], 'state', 'data')
if not state[2] then return 'gone' end
if state[1] == 'dead' or state[1] == 'blocked' or state[1] == 'disabled' then
  redis.call('HSET', KEYS[2], 'state', 'waiting', 'tries', 0, 'since', server_ms())
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  redis.call('ZADD', KEYS[1], server_ms(), ARGV[1])
end
return 'ok'
