-- Cancels a request: one that nothing has been published of ends now, a running one is flagged for its engine.
-- KEYS 1 record, 2 events, 3 statistics, 4 blob, 5... input streams by priority
-- ARGV 1 group, 2 channel, 3 result ttl ms, 4 replay ttl ms, 5 done event with seq 1, 6 error as JSON
-- Replies {"cancelled"} {"requested"} {"ended", state} {"noted"}: no record yet, but a raw entry with this id will see it
local now = server_ms()
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'seq', 'stream', 'entry')
local state = record[1]
if not state then
  redis.call('HSET', KEYS[1], 'cancel', 1)
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return {'noted'}
end
if state ~= 'queued' and state ~= 'running' then return {'ended', state} end

redis.call('HSET', KEYS[1], 'cancel', 1)
if state == 'running' or record[2] ~= '0' or record[3] ~= '0' then return {'requested'} end

local stream = KEYS[5 + tonumber(record[4])]
redis.call('XADD', KEYS[2], '1-0', 'e', ARGV[5])
redis.call('PUBLISH', ARGV[2], '1 ' .. ARGV[5])
redis.call('HSET', KEYS[1], 'state', 'cancelled', 'seq', 1, 'finished', now, 'result', '[]', 'usage', '', 'metrics', '',
  'error', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
remove_entry(stream, ARGV[1], record[5])
redis.call('UNLINK', KEYS[4])
redis.call('HINCRBY', KEYS[3], 'cancelled', 1)
return {'cancelled'}
