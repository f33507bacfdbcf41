-- Finds entries that the group has passed and nobody holds: somebody has moved the group on (XGROUP SETID), acknowledged what
-- an engine ran, or deleted its consumer. No read would ever bring them again.
-- KEYS 1... input streams by priority
-- ARGV 1 group, 2 owner, 3 entries at most, 4 key base, 5... for each stream, the entry after which to look
-- Replies {the entries that this engine has now: {stream number, entry, {fields}} each, {for each stream where to go on}}.
-- What an engine runs is given back to it.
-- include entries
local PAGE = 16
local group, owner, left, base = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local taken, places = {}, {}

local function look_at(stream, key, entry, fields)
  if #ask('XPENDING', key, group, entry, entry, 1) > 0 then return end
  local id = field_of(fields, 'id')
  local r = id and redis.pcall('HMGET', base .. 'req:' .. id, 'state', 'owner', 'entry')
  local runs_at = r and not r.err and r[1] == 'running' and r[3] == entry and r[2]
  if runs_at then
    redis.call('XCLAIM', key, group, runs_at, 0, entry, 'FORCE', 'JUSTID')
  else
    redis.call('XCLAIM', key, group, owner, 0, entry, 'FORCE', 'JUSTID')
    taken[#taken + 1] = {stream, entry, fields}
    left = left - 1
  end
end

for i = 1, #KEYS do
  local key, place = KEYS[i], ARGV[4 + i]
  local told = group_of(key, group)
  -- More is there than somebody holds or is yet to be delivered. Where the server cannot tell, they are looked at.
  if told and redis.call('XLEN', key) > told.pending + (tonumber(told.lag) or 0) then
    local page = redis.call('XRANGE', key, beyond(place), told['last-delivered-id'], 'COUNT', PAGE)
    for _, item in ipairs(page) do
      if left == 0 then break end
      look_at(i - 1, key, item[1], item[2])
      place = item[1]
    end
    if left > 0 and #page < PAGE or not beyond(place) then place = '0-0' end
  end
  places[i] = place
end
return {taken, places}
