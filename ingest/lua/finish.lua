-- Ends a running request: last events, result, ack and delete in one step. Fenced; repeating the call changes nothing.
-- KEYS 1 record, 2 events, 3 input stream, 4 dead letters, 5 statistics, 6 blob
-- ARGV 1 group, 2 entry, 3 owner, 4 attempt, 5 offset: events before these, 6 channel, 7 state, 8 result ttl ms,
--      9 replay ttl ms, 10 result, 11 usage, 12 metrics, 13 error (JSON or empty), 14 generated tokens,
--      15 reason to keep the entry among the dead letters or empty, 16 webhook data of the end,
--      17 of `request.started` if that is not out yet (JSON or empty), 18... events
-- Replies "ok <seq>" "gap <seq>" "stale" "gone" and "cancelled": a cancel was acknowledged, so `completed` is refused
-- include clock
-- include publish
-- include records
-- include entries
-- Writes nothing, but a script that has written is let through by a full server; an end makes room.
redis.call('HDEL', KEYS[1], '')
local now = server_ms()
local group, entry = ARGV[1], ARGV[2]

local function remove()
  remove_entry(KEYS[3], group, entry)
  -- A dead letter may be sent again, and its body does not travel in the letter.
  if ARGV[15] == '' then redis.call('UNLINK', KEYS[6]) else redis.call('PEXPIRE', KEYS[6], 604800000) end
end

local record = redis.call('HMGET', KEYS[1], 'state', 'owner', 'attempt', 'seq', 'cancel', 'tenant', 'callback',
  'created')
if not record[1] then
  if is_pending(KEYS[3], group, entry, ARGV[3]) then remove() end
  return 'gone'
end
if record[2] ~= ARGV[3] or record[3] ~= ARGV[4] then return 'stale' end
if record[1] ~= 'running' then
  if record[1] ~= ARGV[7] then return 'stale' end
  remove() -- in case that the first call broke off
  return 'ok ' .. record[4]
end
if record[5] == '1' and ARGV[7] == 'completed' then return 'cancelled' end

local seq, offset = tonumber(record[4]), tonumber(ARGV[5])
if seq < offset then return 'gap ' .. seq end
seq = publish(KEYS[2], ARGV[6], seq, offset, 18, #ARGV)
if not seq then
  redis.call('HSET', KEYS[1], 'seq', 0)
  return 'gap 0'
end
redis.call('HSET', KEYS[1], 'state', ARGV[7], 'seq', seq, 'finished', now, 'result', ARGV[10], 'usage', ARGV[11],
  'metrics', ARGV[12], 'error', ARGV[13])
redis.call('PEXPIRE', KEYS[1], ARGV[8])
redis.call('PEXPIRE', KEYS[2], ARGV[9])
local base, id = parts_of(KEYS[1])
redis.call('ZREM', base .. 'run:' .. record[6], id)
redis.call('UNLINK', base .. 'watch:' .. id)
redis.call('HINCRBY', KEYS[5], ARGV[7], 1)
redis.call('HINCRBY', KEYS[5], 'tokens', ARGV[14])
if ARGV[15] ~= '' then
  -- include dead_letters
  keep_dead_letter(KEYS[4], KEYS[5], KEYS[3], entry, ARGV[15], ARGV[13], record[3])
end
if record[7] then
  -- include hooks
  local function hook(kind, data) put_hook(base, id, record[8], record[7], kind, data, now) end
  if ARGV[17] ~= '' then hook('request.started', ARGV[17]) end
  if ARGV[16] ~= '' then hook(end_kind(ARGV[7]), ARGV[16]) end
end
remove()
publish_end(base, id, seq)
return 'ok ' .. seq
