-- Cancels a request: one that nobody has begun ends now, a running one is flagged for its engine.
-- KEYS 1 record, 2 events, 3 statistics, 4 blob, 5 waiting, 6 load, 7... input streams by priority
-- ARGV 1 group, 2 key base, 3 request id, 4 result ttl ms, 5 replay ttl ms, 6 error as JSON
-- Replies {"cancelled"} {"requested"} {"ended", state} {"noted"}: no record yet, but a raw entry with this id will see it
-- include clock
-- include publish
-- include records
-- include entries
-- include hooks
-- include load
-- include waiting
-- Writes nothing, but a script that has written is let through by a full server; an end makes room.
redis.call('HDEL', KEYS[1], '')
local now = server_ms()
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'seq', 'stream', 'entry', 'tokens', 'tenant', 'created')
local state = record[1]
if not state then
  redis.call('HSET', KEYS[1], 'cancel', 1)
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  return {'noted'}
end
if state ~= 'queued' and state ~= 'running' then return {'ended', state} end

redis.call('HSET', KEYS[1], 'cancel', 1)
if state == 'running' or record[2] ~= '0' or record[3] ~= '0' then return {'requested'} end

answer(ARGV[2], ARGV[3], 'cancelled', ARGV[6], now, ARGV[4], ARGV[5], '0', tonumber(record[8]))
remove_entry(KEYS[7 + tonumber(record[4])], ARGV[1], record[5])
redis.call('UNLINK', KEYS[4])
uncount(KEYS[5], KEYS[6], ARGV[3], record[4], record[5], record[6] or '0', record[7])
return {'cancelled'}
