-- Accepts or refuses a request: idempotency, duplicate ids, admission, record and stream entry in one step.
-- KEYS 1 input stream, 2 record, 3 blob, 4 statistics, 5 waiting, 6 load, 7 idempotency key (only where it has one)
-- ARGV 1 request id, 2 priority, 3 body, 4 body hash, 5 submission (a number used once, so that a repeated call is known),
--      6 ttl ms, 7 grace ms, 8 tenant, 9 "1": the body goes to the blob key, 10 traceparent, 11 idempotency ttl ms,
--      12 key base, 13 group, 14 prompt tokens, 15 result ttl ms, 16 replay ttl ms, 17 heartbeat timeout ms,
--      18 "1": refuse while no engine lives, 19...22 caps: requests, prompt tokens, the same for the tenant; empty: none,
--      23 ms for which it may go on unwatched, or empty: for ever, 24 callback (JSON as in ingest/callback.py, or empty)
-- Replies {"ok", id} {"repeated", id} {"attached", id} {"conflict", id} {"duplicate", id, state}
--         {"refused", id, error}: told and kept as its result; id and idempotency key may be used again
-- include clock
-- include publish
-- include records
-- include entries
-- include hooks
-- include load
-- include waiting
-- include admission
local now = server_ms()
local id, ttl, grace, base = ARGV[1], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[12]

local record = redis.call('HMGET', KEYS[2], 'state', 'submission', 'refused', 'error')
if record[1] and record[2] == ARGV[5] then
  if record[3] then return {'refused', id, record[4]} end
  return {'repeated', id}
end
if KEYS[7] then
  local seen = redis.call('GET', KEYS[7])
  if seen then
    local first, hash = string.match(seen, '^(%S+) (%S+)$')
    if hash ~= ARGV[4] then return {'conflict', first} end
    return {'attached', first}
  end
end
if record[1] and not record[3] then return {'duplicate', id, record[1]} end
if record[3] then redis.call('UNLINK', KEYS[2]) end
-- Of an earlier request, whose record is gone. Not called in vain: a script that has written once is let through by a
-- full server, and what refuses requests then is the first write being one that needs memory.
if redis.call('EXISTS', base .. 'ev:' .. id) == 1 then redis.call('UNLINK', base .. 'ev:' .. id) end

expire_waiting(base, ARGV[13], now, ARGV[15], ARGV[16])
local problem = refuse(base, ARGV[13], now, tonumber(ARGV[2]), ARGV[8], tonumber(ARGV[14]), ttl, tonumber(ARGV[17]),
  ARGV[18] == '1', {ARGV[19], ARGV[20], ARGV[21], ARGV[22]}, true)
if problem then
  redis.call('HSET', KEYS[2], 'attempt', 0, 'owner', '', 'priority', ARGV[2], 'tenant', ARGV[8], 'created', now,
    'deadline', now + ttl, 'submission', ARGV[5], 'refused', 1)
  -- The caller has it in the reply. Kept for long, the answers of a flood would be what fills the server.
  local kept_ms = math.min(60000, tonumber(ARGV[15]), tonumber(ARGV[16]))
  answer(base, id, 'rejected', problem, now, kept_ms, kept_ms, '0', now)
  return {'refused', id, problem}
end

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
  'entry', entry, 'priority', ARGV[2], 'tenant', ARGV[8], 'created', now, 'deadline', now + ttl, 'submission', ARGV[5],
  'tokens', ARGV[14])
if ARGV[24] ~= '' then redis.call('HSET', KEYS[2], 'callback', ARGV[24]) end
redis.call('PEXPIREAT', KEYS[2], now + ttl + grace)
start_watch(base, id, ARGV[23])
count(KEYS[5], KEYS[6], id, ARGV[2], entry, ARGV[14], ARGV[8], now + ttl)
if KEYS[7] then redis.call('SET', KEYS[7], id .. ' ' .. ARGV[4], 'PX', ARGV[11]) end
redis.call('HINCRBY', KEYS[4], 'submitted', 1)
return {'ok', id}
