-- Publishes events of running requests: as many of one engine's as it has to flush, since a call of its own for each would
-- cost more than what it does. Fenced by owner, attempt and offset; repeating the call changes nothing.
-- KEYS the record of each request
-- ARGV 1 owner, 2 grace ms, 3 key base, then for each request: attempt, offset: events before these, "1": it has a token, so
--      that what it is did not end the engine (said until it is known), webhook data for `request.started` (JSON or empty),
--      what its choices will have told (see ingest/told.py), how many events, these as JSON
-- Replies for each request one line: "ok <seq> <cancel> <expired> <unwatched>" "gap <seq>" "stale" "gone", or the error that
-- it met: one request's harms no other
-- include clock
-- include publish
local owner, grace, base, now = ARGV[1], tonumber(ARGV[2]), ARGV[3], server_ms()
local id_at = #base + 5 -- after "req:"

-- `at`: place of its first argument; `last`: of its last event.
local function append(key, at, last)
  local attempt, hook = ARGV[at], ARGV[at + 3]
  local record = redis.call('HMGET', key, 'state', 'owner', 'attempt', 'seq', 'cancel', 'deadline', 'watch_ms')
  if not record[1] then return 'gone' end
  if record[1] ~= 'running' or record[2] ~= owner or record[3] ~= attempt then return 'stale' end

  local seq, offset, deadline = tonumber(record[4]), tonumber(ARGV[at + 1]), tonumber(record[6])
  if not seq or not deadline then return {err = 'ERR the record ' .. key .. ' has been damaged'} end
  if seq < offset then return 'gap ' .. seq end
  local id = string.sub(key, id_at)
  local events, first, digits = base .. 'ev:' .. id, seq, record[4]
  seq, digits = publish(events, base .. 'ch:' .. id, seq, offset, at + 6, last)
  if not seq then
    redis.call('HSET', key, 'seq', 0)
    return 'gap 0'
  end
  if digits then redis.call('HSET', key, 'seq', digits, 'told', ARGV[at + 4]) else digits = record[4] end
  if ARGV[at + 2] == '1' then
    redis.call('HSET', key, 'progress', attempt)
    if redis.call('HGET', key, 'alone') == '1' then redis.call('HSET', key, 'alone', '') end
  end
  if first == 0 and seq > 0 then redis.call('PEXPIREAT', events, math.max(deadline, now) + grace) end
  if hook ~= '' then
    -- include hooks
    local told = redis.call('HMGET', key, 'callback', 'created')
    if told[1] then put_hook(base, id, told[2], told[1], 'request.started', hook, now) end
  end
  local unwatched = false
  if record[7] then
    -- include records
    unwatched = is_unwatched(base, id, record[7])
  end
  if record[5] ~= '1' and now <= deadline and not unwatched then return 'ok ' .. digits .. ' 0 0 0' end
  return 'ok ' .. digits .. (record[5] == '1' and ' 1' or ' 0') .. (now > deadline and ' 1' or ' 0')
    .. (unwatched and ' 1' or ' 0')
end

local replies, at = {}, 4
for i = 1, #KEYS do
  local last = at + 5 + ARGV[at + 5]
  local went_well, reply = pcall(append, KEYS[i], at, last)
  if not went_well and type(reply) ~= 'table' then reply = {err = tostring(reply)} end
  replies[#replies + 1] = reply
  at = last + 1
end
return replies
