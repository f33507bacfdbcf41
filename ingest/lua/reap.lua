-- Takes over entries whose consumer has no fresh heartbeat (old, or of a time that the clock has not reached) or has left,
-- and delayed ones that are due; removes dead consumers that hold nothing any more. What may have ended its engine is
-- first put aside for a while. A consumer without a heartbeat is no dead one: somebody has deleted the list. It gets one,
-- and with it the time to renew it.
-- KEYS 1 heartbeats, 2 delayed entries, 3... input streams by priority
-- ARGV 1 group, 2 owner, 3 heartbeat timeout ms, 4 entries at most, 5 key base, 6 first retry's delay ms,
--      7 "1": old heartbeats count (else only of engines that have left)
-- Replies the entries taken: {stream number, entry, {fields}} each
-- include clock
-- include entries
-- include death
-- include suspicion
local now = server_ms()
local group, owner, left = ARGV[1], ARGV[2], tonumber(ARGV[4])
local MAX_DELAY_MS = 30000
local taken = {}

local function take(stream, entry)
  -- JUSTID would not tell an entry that was deleted while pending from one that is there.
  local claimed = redis.call('XCLAIM', KEYS[3 + stream], group, owner, 0, entry)
  if claimed[1] and claimed[1][2] then
    taken[#taken + 1] = {stream, entry, claimed[1][2]}
    left = left - 1
  else
    redis.call('XACK', KEYS[3 + stream], group, entry)
  end
end

-- When an entry's next attempt is due, in server ms: now, or later if it may have ended an engine.
local function due_at(r)
  local alone, burns = suspicion(r)
  if alone == '' or not burns then return now end
  local burnt = math.min(tonumber(r[2]) - tonumber(r[6]), 16)
  local delay = math.min(tonumber(ARGV[6]) * 2 ^ (burnt - 1), MAX_DELAY_MS)
  local jitter = 0.75 + (tonumber(redis.call('TIME')[2]) % 1000) / 2000
  return math.min(now + math.floor(delay * jitter), tonumber(r[7]))
end

local function look_at(stream, entry)
  local found = redis.call('XRANGE', KEYS[3 + stream], entry, entry)[1]
  local id = found and field_of(found[2], 'id')
  local r = id and redis.pcall('HMGET', ARGV[5] .. 'req:' .. id, 'state', 'attempt', 'progress', 'alone', 'crashes',
    'released', 'deadline', 'cancel', 'entry', 'stream')
  if not r or r.err or not r[7] or r[9] ~= entry or r[10] ~= tostring(stream) then
    -- Nothing is known of it, or it is gone: `begin` says what becomes of it.
    return take(stream, entry)
  end
  if r[8] == '1' or now > tonumber(r[7]) then return take(stream, entry) end
  local due = due_at(r)
  if due <= now then return take(stream, entry) end
  redis.call('XCLAIM', KEYS[3 + stream], group, DELAYED, 0, entry, 'JUSTID')
  redis.call('ZADD', KEYS[2], due, stream .. ' ' .. entry)
end

if left > 0 then
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, left)) do
    local stream, entry = string.match(member, '^(%d) (%S+)$')
    if is_pending(KEYS[3 + tonumber(stream)], group, entry, DELAYED) then take(tonumber(stream), entry) end
    redis.call('ZREM', KEYS[2], member)
  end
end

local is_dead = judge_of_death(KEYS[1], owner, now, tonumber(ARGV[3]), ARGV[7] == '1')
if not is_dead then return taken end

for stream = 0, #KEYS - 3 do
  local key = KEYS[3 + stream]
  for _, consumer in ipairs(dead_consumers(key, group, owner, is_dead)) do
    if consumer.pending > 0 and left > 0 then
      for _, item in ipairs(redis.call('XPENDING', key, group, '-', '+', math.max(left, 16), consumer.name)) do
        if left > 0 and not (consumer.name == DELAYED and redis.call('ZSCORE', KEYS[2], stream .. ' ' .. item[1])) then
          look_at(stream, item[1])
        end
      end
    end
    -- Deleting a consumer throws its pending entries away, so only one that has none.
    if holds_nothing(key, group, consumer.name) then redis.call('XGROUP', 'DELCONSUMER', key, group, consumer.name) end
  end
end
for _, engine in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], LEFT, LEFT)) do
  if holds_nothing_of(KEYS, 3, group, engine) then redis.call('ZREM', KEYS[1], engine) end
end
return taken
