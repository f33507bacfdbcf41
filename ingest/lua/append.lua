-- Publishes events of a running request. Fenced by owner, attempt and offset; repeating the call changes nothing.
-- KEYS 1 record, 2 events
-- ARGV 1 owner, 2 attempt, 3 offset: events before these, 4 channel, 5 grace ms, 6 "1": it has a token, so that what it is
--      did not end the engine, 7 webhook data for `request.started` (JSON or empty), 8... events as JSON
-- Replies one line, since this is called for every flush of every request: "ok <seq> <cancel> <expired> <unwatched>"
-- "gap <seq>" "stale" "gone"
local now = server_ms()
local record = redis.call('HMGET', KEYS[1], 'state', 'owner', 'attempt', 'seq', 'cancel', 'deadline', 'progress', 'alone',
  'watch_ms')
if not record[1] then return redis.status_reply('gone') end
if record[1] ~= 'running' or record[2] ~= ARGV[1] or record[3] ~= ARGV[2] then return redis.status_reply('stale') end

local seq, offset = tonumber(record[4]), tonumber(ARGV[3])
if seq < offset then return redis.status_reply('gap ' .. seq) end
local first = seq
seq = publish(KEYS[2], ARGV[4], seq, offset, 8)
if seq > first then redis.call('HSET', KEYS[1], 'seq', seq) end
if ARGV[6] == '1' and record[7] ~= ARGV[2] then
  redis.call('HSET', KEYS[1], 'progress', ARGV[2])
  if record[8] == '1' then redis.call('HSET', KEYS[1], 'alone', '') end
end
if first == 0 and seq > 0 then
  redis.call('PEXPIREAT', KEYS[2], math.max(tonumber(record[6]), now) + tonumber(ARGV[5]))
end
if ARGV[7] ~= '' then
  local told = redis.call('HMGET', KEYS[1], 'callback', 'created')
  local base, id = parts_of(KEYS[1])
  if told[1] then put_hook(base, id, told[2], told[1], 'request.started', ARGV[7], now) end
end
local expired = now > tonumber(record[6]) and '1' or '0'
local cancel = record[5] == '1' and '1' or '0'
local unwatched = false
if record[9] then
  local base, id = parts_of(KEYS[1])
  unwatched = is_unwatched(base, id, record[9])
end
return redis.status_reply('ok ' .. seq .. ' ' .. cancel .. ' ' .. expired .. (unwatched and ' 1' or ' 0'))
