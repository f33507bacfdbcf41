-- Publishes events of running requests: as many of one engine's as it has to flush, since a call of its own for each would
-- cost more than what it does. Fenced by owner, attempt and offset; repeating the call changes nothing.
-- KEYS for each request: record, events
-- ARGV 1 owner, 2 grace ms, then for each request: attempt, offset: events before these, channel, "1": it has a token, so
--      that what it is did not end the engine, webhook data for `request.started` (JSON or empty), what its choices will
--      have told (see ingest/told.py), how many events, these as JSON
-- Replies for each request one line: "ok <seq> <cancel> <expired> <unwatched>" "gap <seq>" "stale" "gone", or the error that
-- it met: one request's harms no other
-- include clock
-- include publish
local owner, grace, now = ARGV[1], tonumber(ARGV[2]), server_ms()

-- `at`: place of its first argument; `last`: of its last event.
local function append(key, events, at, last)
  local attempt, hook = ARGV[at], ARGV[at + 4]
  local record = redis.call('HMGET', key, 'state', 'owner', 'attempt', 'seq', 'cancel', 'deadline', 'progress', 'alone',
    'watch_ms')
  if not record[1] then return 'gone' end
  if record[1] ~= 'running' or record[2] ~= owner or record[3] ~= attempt then return 'stale' end

  local seq, offset, deadline = tonumber(record[4]), tonumber(ARGV[at + 1]), tonumber(record[6])
  if not seq or not deadline then return {err = 'ERR the record ' .. key .. ' has been damaged'} end
  if seq < offset then return 'gap ' .. seq end
  local first = seq
  seq = publish(events, ARGV[at + 2], seq, offset, at + 7, last)
  if not seq then
    redis.call('HSET', key, 'seq', 0)
    return 'gap 0'
  end
  if seq > first then redis.call('HSET', key, 'seq', seq, 'told', ARGV[at + 5]) end
  if ARGV[at + 3] == '1' and record[7] ~= attempt then
    redis.call('HSET', key, 'progress', attempt)
    if record[8] == '1' then redis.call('HSET', key, 'alone', '') end
  end
  if first == 0 and seq > 0 then redis.call('PEXPIREAT', events, math.max(deadline, now) + grace) end
  if hook ~= '' then
    -- include records
    -- include hooks
    local told = redis.call('HMGET', key, 'callback', 'created')
    local base, id = parts_of(key)
    if told[1] then put_hook(base, id, told[2], told[1], 'request.started', hook, now) end
  end
  local unwatched = false
  if record[9] then
    -- include records
    local base, id = parts_of(key)
    unwatched = is_unwatched(base, id, record[9])
  end
  if record[5] ~= '1' and now <= deadline and not unwatched then return 'ok ' .. seq .. ' 0 0 0' end
  return 'ok ' .. seq .. (record[5] == '1' and ' 1' or ' 0') .. (now > deadline and ' 1' or ' 0')
    .. (unwatched and ' 1' or ' 0')
end

local replies, at = {}, 3
for i = 1, #KEYS, 2 do
  local last = at + 6 + ARGV[at + 6]
  local went_well, reply = pcall(append, KEYS[i], KEYS[i + 1], at, last)
  if not went_well and type(reply) ~= 'table' then reply = {err = tostring(reply)} end
  replies[#replies + 1] = reply
  at = last + 1
end
return replies
