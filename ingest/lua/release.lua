-- Gives a running request back, as an engine that stops does: the next engine goes on, and no attempt is burnt.
-- The entry stays pending under this consumer; once its heartbeat is gone, any engine may adopt it.
-- KEYS 1 record
-- ARGV 1 owner, 2 attempt
-- Replies {"ok"} {"stale"}
local record = redis.call('HMGET', KEYS[1], 'state', 'owner', 'attempt')
if record[1] ~= 'running' or record[2] ~= ARGV[1] or record[3] ~= ARGV[2] then return {'stale'} end
redis.call('HSET', KEYS[1], 'state', 'queued', 'owner', '')
redis.call('HINCRBY', KEYS[1], 'released', 1)
return {'ok'}
