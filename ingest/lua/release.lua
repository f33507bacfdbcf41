-- Gives a running request back, as an engine that stops does: the next engine goes on, and no attempt is burnt.
-- The entry stays pending under this consumer; once its heartbeat is gone, any engine may take it.
-- KEYS 1 record, 2 waiting, 3 load
-- ARGV 1 owner, 2 attempt, 3 request id
-- Replies {"ok"} {"stale"}
-- include records
-- include load
local record = redis.call('HMGET', KEYS[1], 'state', 'owner', 'attempt', 'stream', 'entry', 'tokens', 'tenant',
  'deadline')
if record[1] ~= 'running' or record[2] ~= ARGV[1] or record[3] ~= ARGV[2] then return {'stale'} end
redis.call('HSET', KEYS[1], 'state', 'queued', 'owner', '')
redis.call('HINCRBY', KEYS[1], 'released', 1)
local base = parts_of(KEYS[1])
redis.call('ZREM', base .. 'run:' .. record[7], ARGV[3])
if record[6] then count(KEYS[2], KEYS[3], ARGV[3], record[4], record[5], record[6], record[7], record[8]) end
return {'ok'}
