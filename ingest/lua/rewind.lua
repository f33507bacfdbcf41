-- Goes back to the events of a running request that are still there and fit together: those that follow are written anew.
-- Fenced; repeating the call changes nothing.
-- KEYS 1 record, 2 events
-- ARGV 1 owner, 2 attempt, 3 how many events are kept
-- Replies "ok" "stale"
local record = redis.call('HMGET', KEYS[1], 'state', 'owner', 'attempt', 'seq')
if record[1] ~= 'running' or record[2] ~= ARGV[1] or record[3] ~= ARGV[2] then return 'stale' end
local ttl = redis.call('PTTL', KEYS[1])
local kept = redis.call('XRANGE', KEYS[2], '-', ARGV[3] .. '-0')
-- Made anew, since a stream remembers its last number and takes none below it.
redis.call('UNLINK', KEYS[2])
for _, item in ipairs(kept) do redis.call('XADD', KEYS[2], item[1], unpack(item[2])) end
if #kept > 0 then redis.call('PEXPIRE', KEYS[2], math.max(ttl, 1000)) end
redis.call('HSET', KEYS[1], 'seq', ARGV[3])
return 'ok'
