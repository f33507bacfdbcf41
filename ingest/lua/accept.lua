-- Gives a raw entry that waits its record, or answers it: what `submit` does at once, an engine does for it when it sees
-- it. Only for an entry that no engine has; one that was delivered is its engine's until it is given back. Repeating changes
-- nothing.
-- KEYS 1 input stream, 2 record, 3 statistics, 4 waiting, 5 load, 6 dead letters
-- ARGV 1 group, 2 entry, 3 request id, 4 stream number, 5 ttl ms, 6 tenant, 7 prompt tokens, 8 grace ms, 9 key base,
--      10 result ttl ms, 11 replay ttl ms, 12 heartbeat timeout ms, 13 error as JSON (it is refused for that) or empty,
--      14 reason to keep the entry among the dead letters or empty, 15...18 caps, 19 watch, 20 callback, as in submit
-- Replies "ok" "known" "taken" "duplicate", or the state in which it has ended
-- include clock
-- include publish
-- include records
-- include entries
-- include dead_letters
-- include hooks
-- include load
-- include waiting
-- include admission
local now = server_ms()
local entry, id, stream, base = ARGV[2], ARGV[3], ARGV[4], ARGV[9]

local record = redis.call('HMGET', KEYS[2], 'state', 'entry', 'stream', 'cancel')
if record[1] and record[2] == entry and record[3] == stream then return 'known' end
if not is_nobodys(KEYS[1], ARGV[1], entry) then return 'taken' end
if record[1] then
  keep_dead_letter(KEYS[6], KEYS[3], KEYS[1], entry, 'duplicate_id', 'the request id is in use by another entry', '0')
  remove_entry(KEYS[1], ARGV[1], entry)
  return 'duplicate'
end

local created = accepted_at(entry, now)
local deadline = created + tonumber(ARGV[5])
local state, problem
if record[4] == '1' then
  state, problem = 'cancelled', CANCELLED
elseif ARGV[13] ~= '' then
  state, problem = 'rejected', ARGV[13]
elseif now > deadline then
  state, problem = 'expired', EXPIRED
else
  expire_waiting(base, ARGV[1], now, ARGV[10], ARGV[11])
  problem = refuse(base, ARGV[1], now, tonumber(stream), ARGV[6], tonumber(ARGV[7]), deadline - now,
    tonumber(ARGV[12]), false, {ARGV[15], ARGV[16], ARGV[17], ARGV[18]}, false)
  if problem then state = 'rejected' end
end
redis.call('UNLINK', base .. 'ev:' .. id)
redis.call('HSET', KEYS[2], 'state', 'queued', 'attempt', 0, 'released', 0, 'seq', 0, 'owner', '', 'stream', stream,
  'entry', entry, 'priority', stream, 'tenant', ARGV[6], 'created', created, 'deadline', deadline, 'tokens', ARGV[7])
if ARGV[20] ~= '' then redis.call('HSET', KEYS[2], 'callback', ARGV[20]) end
if state then
  if ARGV[14] ~= '' then keep_dead_letter(KEYS[6], KEYS[3], KEYS[1], entry, ARGV[14], problem, '0') end
  answer(base, id, state, problem, now, ARGV[10], ARGV[11], '0', created)
  remove_entry(KEYS[1], ARGV[1], entry)
  redis.call('UNLINK', base .. 'blob:' .. id)
  return state
end
start_watch(base, id, ARGV[19])
redis.call('PEXPIREAT', KEYS[2], deadline + tonumber(ARGV[8]))
count(KEYS[4], KEYS[5], id, stream, entry, ARGV[7], ARGV[6], deadline)
return 'ok'
