-- Looks at what engines that are dead or have left hold, and what was given back, for an engine that has no room: what is
-- cancelled or past its deadline is this engine's, for it to end. Raw entries that nobody has begun have no record yet that
-- would say so; they are nobody's then, and `accept` gives them one.
-- KEYS 1 heartbeats, 2 delayed entries, 3... input streams by priority
-- ARGV 1 group, 2 owner, 3 heartbeat timeout ms, 4 entries of a consumer at most, 5 key base, 6 "1": old heartbeats count
--      (else only of engines that have left), 7... for each stream where to begin, as in XPENDING
-- Replies {{stream number, entry, {fields}} for each entry that is this engine's, the same for those without a record,
--          {for each stream where to go on}}
-- include clock
-- include entries
-- include death
local now, group, owner, most, base = server_ms(), ARGV[1], ARGV[2], tonumber(ARGV[4]), ARGV[5]
local to_end, unknown, places = {}, {}, {}

local function look_at(stream, key, entry, consumer)
  local fields = (redis.call('XRANGE', key, entry, entry)[1] or {})[2]
  if not fields then redis.call('XACK', key, group, entry) return end
  local r = redis.pcall('HMGET', base .. 'req:' .. (field_of(fields, 'id') or ''), 'deadline', 'cancel', 'entry', 'stream')
  local is_known = not r.err and r[1] and r[3] == entry and r[4] == tostring(stream)
  if is_known and (r[2] == '1' or now > tonumber(r[1])) then
    redis.call('XCLAIM', key, group, owner, 0, entry, 'JUSTID')
    to_end[#to_end + 1] = {stream, entry, fields}
  elseif not is_known then
    if consumer ~= DELAYED then
      redis.call('XCLAIM', key, group, DELAYED, 0, entry, 'JUSTID')
      redis.call('ZADD', KEYS[2], now, stream .. ' ' .. entry)
    end
    unknown[#unknown + 1] = {stream, entry, fields}
  end
end

local is_dead = judge_of_death(KEYS[1], owner, now, tonumber(ARGV[3]), ARGV[6] == '1')
for stream = 0, #KEYS - 3 do
  local key, first = KEYS[3 + stream], ARGV[7 + stream]
  -- The least of the last entries of full pages: nothing that lies beyond it has been passed over.
  local last
  for _, consumer in ipairs(is_dead and dead_consumers(key, group, owner, is_dead) or {}) do
    local page = ask('XPENDING', key, group, first, '+', most, consumer.name)
    for _, item in ipairs(page) do look_at(stream, key, item[1], consumer.name) end
    if #page == most and (not last or is_after(last, page[most][1])) then last = page[most][1] end
  end
  places[#places + 1] = last and beyond(last) or '-'
end
return {to_end, unknown, places}
