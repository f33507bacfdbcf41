-- Accepts a request: idempotency, duplicate ids, record and stream entry in one step.
-- KEYS 1 input stream, 2 record, 3 blob, 4 statistics, 5 idempotency key (only where the request has one)
-- ARGV 1 request id, 2 priority, 3 body, 4 body hash, 5 submission (a number used once, so that a repeated call is known),
--      6 ttl ms, 7 grace ms, 8 tenant, 9 "1": the body goes to the blob key, 10 traceparent, 11 idempotency ttl ms
-- Replies {"ok", id} {"repeated", id} {"attached", id} {"conflict", id} {"duplicate", id, state}
local now = server_ms()
local id, ttl, grace = ARGV[1], tonumber(ARGV[6]), tonumber(ARGV[7])

local record = redis.call('HMGET', KEYS[2], 'state', 'submission')
if record[1] then
  if record[2] == ARGV[5] then return {'repeated', id} end
end
if KEYS[5] then
  local seen = redis.call('GET', KEYS[5])
  if seen then
    local first, hash = string.match(seen, '^(%S+) (%S+)$')
    if hash ~= ARGV[4] then return {'conflict', first} end
    return {'attached', first}
  end
end
if record[1] then return {'duplicate', id, record[1]} end

local fields = {'v', '1', 'id', id}
if ARGV[9] == '1' then
  redis.call('SET', KEYS[3], ARGV[3], 'PX', ttl + grace)
  fields[5], fields[6] = 'blob', '1'
else
  fields[5], fields[6] = 'body', ARGV[3]
end
if ARGV[10] ~= '' then
  fields[7], fields[8] = 'traceparent', ARGV[10]
end
local entry = redis.call('XADD', KEYS[1], '*', unpack(fields))
-- A cancel that came before its request is kept: the field is not among those written here.
redis.call('HSET', KEYS[2], 'state', 'queued', 'attempt', 0, 'released', 0, 'seq', 0, 'owner', '', 'stream', ARGV[2],
  'entry', entry, 'priority', ARGV[2], 'tenant', ARGV[8], 'created', now, 'deadline', now + ttl, 'submission', ARGV[5])
redis.call('PEXPIREAT', KEYS[2], now + ttl + grace)
if KEYS[5] then redis.call('SET', KEYS[5], id .. ' ' .. ARGV[4], 'PX', ARGV[11]) end
redis.call('HINCRBY', KEYS[4], 'submitted', 1)
return {'ok', id}
